"""What happens to heads inside a kernel before the softmax: norms and rotation of queries and keys, in the rounding
order of `framework.layers.ops`, soft caps of scores, and sinks.

Functions for kernels only: `decode`, `prompt` and `write` call them. Every head is loaded twice, once with its halves
swapped, so that a rotation needs no exchange between threads.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


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

    @property
    def changes(self) -> bool:
        """Whether it leaves heads other than they come."""
        return self.table is not None or self.q_weight is not None


@triton.jit
def capped(scores, scale_2, SOFTCAP: tl.constexpr):
    """Products of queries and keys as softly capped scores, times log2 e. scale_2: the scale times log2 e.

    tanh is taken from an exponential, which every device and the interpreter have: 1e-7 off, times the cap.
    """
    raised = tl.exp2(scores * (scale_2 * (2.0 / SOFTCAP)))
    return (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (raised + 1.0))


@triton.jit
def sinks_of(sinks, query_head, is_member):
    """Sinks of query heads, [n] float32 times log2 e; 0 for those that do not exist."""
    return tl.load(sinks + query_head, mask=is_member, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def angles(turning, position, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """(cosines, sines) [n, DIM_PAD] float32 of positions [n, 1]; zeros without a rotation.

    A padding row has length 0, so that its position is -1: it gets those of position 0, and does nothing with them.
    """
    d = tl.arange(0, DIM_PAD)[None, :]
    cos, sin = tl.zeros([1, DIM_PAD], tl.float32), tl.zeros([1, DIM_PAD], tl.float32)
    if turning.table is not None:
        row = turning.table + tl.maximum(position, 0).to(tl.int64) * (2 * DIM) + d
        cos, sin = tl.load(row, mask=d < DIM, other=0.0), tl.load(row + DIM, mask=d < DIM, other=0.0)
    return cos, sin


@triton.jit
def loaded(heads, weight, turning, is_in, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """What `turned` takes of heads at pointers `heads` [n, 1]: them, them with their halves swapped, and the weights of
    both, as stored. Apart from `turned`, so that a kernel has all that it loads on the way before it waits for any.

    is_in [n, 1]: heads that exist; others are 0. weight: pointer of the norm's [D] weights, or None.
    """
    d = tl.arange(0, DIM_PAD)[None, :]
    swapped = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    x = tl.load(heads + d, mask=is_in & (d < DIM), other=0.0)
    y, w, w_y = x, x, x
    if turning.table is not None:
        y = tl.load(heads + swapped, mask=is_in & (d < DIM), other=0.0)
    if weight is not None:
        w = tl.load(weight + d, mask=d < DIM, other=0.0)
        w_y = tl.load(weight + swapped, mask=d < DIM, other=0.0)
    return x, y, w, w_y


@triton.jit
def turned(raw, weight, turning, cos, sin, DIM: tl.constexpr):
    """The heads that `loaded` gave, normalised and rotated: [n, DIM_PAD] float32, rounded to their dtype.

    weight and the table only tell whether there are norms and a rotation.
    """
    x, y, w, w_y = raw
    stored: tl.constexpr = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if weight is not None:
        # The quotient is rounded before the product with the weight, and that again.
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + turning.eps)[:, None]
        x = (w.to(tl.float32) * (x * scale).to(stored).to(tl.float32)).to(stored).to(tl.float32)
        y = (w_y.to(tl.float32) * (y * scale).to(stored).to(tl.float32)).to(stored).to(tl.float32)
    if turning.table is not None:
        x = (x * cos + y * sin).to(stored).to(tl.float32)
    return x
