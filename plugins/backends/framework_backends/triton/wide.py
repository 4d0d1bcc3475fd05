"""Products of a float32 weight, such as a router's, with rows of 16 bits: each is widened as it is read.

All of it counts in float32, without the matrix units, whose sums keep less. The reference is
`torch.nn.functional.linear` of `x.float()`; tiles are chosen in `cuda_linear`. A few rows take the norm in front of
them along, with the bits of `norms` and of `wide_kernel` behind it: a token has the same experts either way.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_backends.triton.launches import let_next_begin, wait_for_previous
from framework_backends.triton.norms import scale_of, scaled, stream_at


@triton.jit
def wide_piece(pointers, k, K: tl.constexpr, BK: tl.constexpr):
    """float32 of what stands there, 0 from column K on."""
    if K % BK == 0:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=k < K, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def wide_kernel(
    x, stride, weight, bias, y, T, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN outputs, blocks of BM rows): y [T, N] = x [T, K] @ weight [N, K] transposed, + bias [N] or
    None.

    A tile adds up BK columns side by side, piece by piece, and these at the end: what an output gets depends on its
    own row alone. The first piece of the weight is asked for before the kernel in front has ended.
    """
    let_next_begin(DEPENDENT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)[None, None, :]
    # Rows beyond the end are read as the last one and never stored.
    weights = weight + (tl.minimum(n, N - 1) * K)[None, :, None] + k
    xs = x + (tl.minimum(m, T - 1).to(tl.int64) * stride)[:, None, None] + k
    piece = wide_piece(weights, k, K, BK)
    wait_for_previous(DEPENDENT)
    total = wide_piece(xs, k, K, BK) * piece
    for low in tl.static_range(BK, K, BK):
        total += wide_piece(xs + low, low + k, K, BK) * wide_piece(weights + low, low + k, K, BK)
    value = tl.sum(total, axis=2)
    if bias is not None:
        value += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], value, mask=(m < T)[:, None] & (n < N)[None, :])


@triton.jit
def rows_at(pointer, row, stride, d):
    """[rows, columns] pointers to columns d of rows that are `stride` apart; None where there are none."""
    if pointer is None:
        return None
    else:
        return pointer + (row.to(tl.int64) * stride)[:, None] + d[None, :]


@triton.jit
def normed_piece(x, residual, factor, scale, k, K: tl.constexpr, normed):
    """What `wide_piece` would read of a normalised row: columns k of the row that begins at x, and at residual."""
    mask = k < K
    values = stream_at(x + k, residual + k if residual is not None else None, mask, normed)
    values = scaled(values, scale, tl.load(factor + k, mask=mask, other=0.0).to(tl.float32), factor, normed)
    return values.to(normed.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def normed_wide_kernel(
    x, x_stride, residual, residual_stride, factor, eps, normed, stream, weight, bias, y, T,
    N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, T): normed [T, K], RMS norm of x + residual with weight factor [K]; stream [T, K], the sum, unless
    residual is None; y [T, N] as `wide_kernel` makes it of normed with tiles of one row and one output.

    Every program normalises its row by itself, in a block of ROWS rows of WIDTH columns, as a program of `norm_kernel`
    does: a sum is made in the same order then. The first of a row writes it.
    """
    let_next_begin(DEPENDENT)
    n, m = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BK)[None, None, :]
    piece = wide_piece(weight + n * K + k, k, K, BK)
    wait_for_previous(DEPENDENT)
    row, d = m // ROWS * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    mask = (row < T)[:, None] & (d < K)[None, :]
    values = stream_at(rows_at(x, row, x_stride, d), rows_at(residual, row, residual_stride, d), mask, normed)
    scales = scale_of(values, K, eps)
    if n == 0:
        own = mask & (row == m)[:, None]
        if residual is not None:
            tl.store(rows_at(stream, row, K, d), values, mask=own)
        by = tl.load(factor + d, mask=d < K, other=0.0).to(tl.float32)
        tl.store(rows_at(normed, row, K, d), scaled(values, scales[:, None], by[None, :], factor, normed), mask=own)
    scale = tl.sum(tl.where(row == m, scales, 0.0), axis=0)
    x += m.to(tl.int64) * x_stride
    carried = residual + m.to(tl.int64) * residual_stride if residual is not None else None
    total = normed_piece(x, carried, factor, scale, k, K, normed) * piece
    for low in tl.static_range(BK, K, BK):
        weights = wide_piece(weight + n * K + low + k, low + k, K, BK)
        total += normed_piece(x, carried, factor, scale, low + k, K, normed) * weights
    value = tl.sum(total, axis=2)
    if bias is not None:
        value += tl.load(bias + n)
    tl.store(y + m.to(tl.int64) * N + n + tl.zeros((1, 1), tl.int32), value)
