"""Root-mean-square norms over the last dimension, alone or behind the residual add, one launch each.

The references are `rms_norm` and `add_rms_norm` of `framework.layers.ops`. A row's bits do not depend on the others:
the block of a program follows from the width alone. Called by `cuda_layer_ops` and `cuda_linear`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from framework_backends.triton.launches import launch_words, let_next_begin, wait_for_previous

BLOCK_VALUES = 2048
"""Of a program that takes several narrow rows: 8 values a thread with 8 warps."""


class View(NamedTuple):
    """Rows [outer, inner, D] of any strides but contiguous along D, numbered outer * inner_count + inner."""

    pointer: Any
    outer_stride: Any
    inner_stride: Any
    inner_count: Any


@triton.jit
def places(view, row):
    """Where rows begin."""
    outer = row // view.inner_count
    return outer.to(tl.int64) * view.outer_stride + (row - outer * view.inner_count) * view.inner_stride


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x, residual, weight, normed, stream, num_rows, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS rows,): normed [rows, D] contiguous; with a residual also stream [rows, D], their sum.

    x and residual are Views; stream may be the residual's own memory. WIDTH is D or the power of 2 above.
    """
    let_next_begin(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    factor = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    values = tl.load(x.pointer + places(x, row)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    dtype = normed.dtype.element_ty
    if residual is not None:
        carried = tl.load(residual.pointer + places(residual, row)[:, None] + d[None, :], mask=mask, other=0.0)
        values = (values + carried.to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(stream.pointer + places(stream, row)[:, None] + d[None, :], values, mask=mask)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / D + eps)
    scaled = values * scale[:, None]
    if weight.dtype.element_ty == dtype:  # a wider weight multiplies before the only rounding
        scaled = scaled.to(dtype).to(tl.float32)
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(normed + at, scaled * factor[None, :], mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, dependent: bool = False) -> Tensor:
    """As `layers.ops.rms_norm`, for x [D], [T, D] or [T, H, D]."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_view(x), None, weight, normed, None, eps, dependent)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, in_place: bool, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """As `layers.ops.add_rms_norm`; in_place makes the sum in the memory of `residual`."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = residual if in_place else torch.empty_like(normed)
    _launch(_view(x), _view(residual), weight, normed, _view(stream), eps, dependent)
    return normed, stream


def _view(x: Tensor) -> View:
    assert x.stride(-1) == 1, f"rows must be contiguous, strides are {x.stride()}"
    if x.ndim == 3:
        return View(x, x.stride(0), x.stride(1), x.shape[1])
    assert x.ndim <= 2, x.shape
    return View(x, x.stride(0) if x.ndim == 2 else 0, 0, 1)


def _launch(
    x: View, residual: View | None, weight: Tensor, normed: Tensor, stream: View | None, eps: float, dependent: bool
) -> None:
    size = weight.shape[0]
    width = triton.next_power_of_2(size)
    rows = max(1, BLOCK_VALUES // width)
    num_rows = normed.numel() // size
    if num_rows:
        norm_kernel[(triton.cdiv(num_rows, rows),)](
            x, residual, weight, normed, stream, num_rows, eps, D=size, WIDTH=width, ROWS=rows,
            num_warps=min(16, max(1, rows * width // 256)), **launch_words(dependent),
        )  # fmt: skip
