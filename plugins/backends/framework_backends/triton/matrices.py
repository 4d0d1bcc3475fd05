"""Dense products of any number of rows in one fixed order of summation, so that a row's bits depend on that row alone.

Each output is one chain of matrix instructions over its columns, 16 at a time from the first to the last, in whichever
tile it lies. The reference is `torch.nn.functional.linear`; tiles are chosen in `cuda_linear`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_backends.triton.launches import let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["T"])
def matrix_kernel(
    x, stride, weight, bias, y, T, N, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    DOT_F32: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of y,): y [T, N] = x [T, K] @ weight [N, K] transposed, + bias [N] or None.

    Tiles of GROUP blocks of rows stand below each other before the next block of columns, so that both stay in cache.
    """
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    blocks_m = tl.cdiv(T, BM)
    blocks_n = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    group = tile // (GROUP * blocks_n)
    height = tl.minimum(blocks_m - group * GROUP, GROUP)
    place = tile - group * GROUP * blocks_n
    m = (group * GROUP + place % height) * BM + tl.arange(0, BM)
    n = (place // height) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows beyond the end are read as the last one and never stored.
    xs = x + tl.minimum(m, T - 1).to(tl.int64)[:, None] * stride + k[None, :]
    weights = weight + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for low in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(xs + low)
            b = tl.load(weights + low)
        else:
            a = tl.load(xs + low, mask=(low + k < K)[None, :], other=0.0)
            b = tl.load(weights + low, mask=(low + k < K)[:, None], other=0.0)
        if DOT_F32:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    into = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(into, total, mask=(m < T)[:, None] & (n < N)[None, :])
