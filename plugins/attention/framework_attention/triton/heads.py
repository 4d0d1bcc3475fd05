"""Norms and rotation of query and key heads inside a kernel, in the rounding order of `framework.layers.ops`.

Functions for kernels only: `decode` and `write` call them. Every head is loaded twice, once with its halves swapped,
so that a rotation needs no exchange between threads.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Projected(NamedTuple):
    """The step's queries, keys and values before they are rotated. A head's D values are consecutive.

    q [T, Hq, D], k, v [T, Hk, D] with *_stride values from token to token. slots [T] int64.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_stride: int
    k_stride: int
    v_stride: int
    slots: Tensor


class Turning(NamedTuple):
    """What happens to heads before they count. table [positions, 2, D] float32 cosines, sines; None: no rotation.

    q_weight, k_weight [D]; None: no norms.
    """

    table: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


@triton.jit
def turned(heads, weight, turning, position, is_in, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Heads at pointers `heads` [n, 1], normalised and rotated: [n, DIM_PAD] float32, rounded to their dtype.

    is_in [n, 1]: heads that exist; others are 0. weight: pointer of the norm's [D] weights, or None.
    """
    stored: tl.constexpr = heads.dtype.element_ty
    d = tl.arange(0, DIM_PAD)[None, :]
    inside = d < DIM
    x = tl.load(heads + d, mask=is_in & inside, other=0.0).to(tl.float32)
    scale = _scale(x, turning.eps, DIM)
    if turning.table is None:
        if weight is not None:
            x = _normed(x, scale, weight, d, inside)
    else:
        swapped = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
        y = tl.load(heads + swapped, mask=is_in & inside, other=0.0).to(tl.float32)
        if weight is not None:
            x = _normed(x, scale, weight, d, inside)
            y = _normed(y, scale, weight, swapped, inside)
        row = turning.table + position.to(tl.int64) * (2 * DIM) + d
        cos, sin = tl.load(row, mask=inside, other=0.0), tl.load(row + DIM, mask=inside, other=0.0)
        x = (x * cos + y * sin).to(stored).to(tl.float32)
    return x


@triton.jit
def _scale(x, eps, DIM: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]


@triton.jit
def _normed(x, scale, weight, d, inside):
    """The quotient is rounded before the product with the weight, and that again."""
    stored: tl.constexpr = weight.dtype.element_ty
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    return (w * (x * scale).to(stored).to(tl.float32)).to(stored).to(tl.float32)
