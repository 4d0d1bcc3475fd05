"""Products of a float32 weight, such as a router's, with rows of 16 bits: each is widened as it is read.

All of it counts in float32, without the matrix units, whose sums keep less. The reference is
`torch.nn.functional.linear` of `x.float()`; tiles are chosen in `cuda_linear`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_backends.triton.launches import let_next_begin, wait_for_previous


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
