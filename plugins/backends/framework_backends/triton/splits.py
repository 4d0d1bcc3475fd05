"""Products of up to some dozens of rows, whose columns are split over programs that meet in memory.

A weight of few rows gives few tiles, too few to keep a device reading. So several programs share a tile, each with its
part of the columns, and the one that ends last adds their sums, always in the same order. The weight is the tall
operand of the matrix units. The reference is that of `products`; shapes and launches are chosen in `cuda_linear`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_backends.triton.activations import silu
from framework_backends.triton.groups import is_last_program
from framework_backends.triton.launches import let_next_begin, wait_for_previous
from framework_backends.triton.products import rounded


@triton.jit
def times(weight, x, total, DOT_F32: tl.constexpr):
    """total [BN, M] + weight [BN, BK] @ x [BK, M]; DOT_F32 multiplies in float32, as the interpreter must."""
    if DOT_F32:
        return tl.dot(weight.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(weight, x, total)


@triton.jit
def piece(pointers, low, k, K: tl.constexpr, EVEN: tl.constexpr):
    """What lies at columns low + k, 0 from K on. EVEN: all lie below K."""
    if EVEN:
        return tl.load(pointers + low)
    return tl.load(pointers + low, mask=low + k < K, other=0.0)


@triton.jit
def store_tile(value, target, first, T, N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Sums [BN, M] of a tile to y, with bias and gate."""
    OUTPUTS: tl.constexpr = BN // 2 if GATED else BN
    out = first + tl.arange(0, OUTPUTS)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(value, (OUTPUTS, 2, M)), (0, 2, 1)))
        if target.bias is not None:
            gate += tl.load(target.bias + out, mask=out < N, other=0.0).to(tl.float32)[:, None]
            up += tl.load(target.bias + N + out, mask=out < N, other=0.0).to(tl.float32)[:, None]
        value = rounded(silu(rounded(gate, target.y)), target.y) * rounded(up, target.y)
    elif target.bias is not None:
        value += tl.load(target.bias + out, mask=out < N, other=0.0).to(tl.float32)[:, None]
    m = tl.arange(0, M)[None, :]
    tl.store(target.y + (m * N + out[:, None]), value, mask=(m < T) & (out < N)[:, None])


@triton.jit(do_not_specialize=["T"])
def split_kernel(
    x, stride, target, sums, counters, T, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, DOT_F32: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BN rows of the weight, SPLIT): y of x [T, K], T <= M. N counts outputs.

    sums [tiles, SPLIT, BN, M] float32 is for sums of parts (None for one part); counters [tiles] int32 are 0 before and
    after. Every part has a piece. The first of the weight is asked for before the kernel in front has ended.
    """
    let_next_begin(DEPENDENT)
    EVEN: tl.constexpr = K % BK == 0
    PIECES: tl.constexpr = (K + BK - 1) // BK
    PER_PART: tl.constexpr = (PIECES + SPLIT - 1) // SPLIT
    tile = tl.program_id(0)
    part = tl.program_id(1)
    begin = part * (PER_PART * BK)
    end = tl.minimum(begin + PER_PART * BK, PIECES * BK)
    first = tile * (BN // 2 if GATED else BN)
    n = tl.arange(0, BN)[:, None]
    row = tl.minimum(first + n, N - 1)
    if GATED:  # gate and up rows in turn, so that both of an output are in one tile
        row = tl.minimum(first + n // 2, N - 1) + (n % 2) * N
    k = tl.arange(0, BK)
    weights = target.weight + (row.to(tl.int64) * K + k[None, :])
    m = tl.arange(0, M)[None, :]
    # Rows from T on are read as the last one, and never stored.
    xs = x + (tl.minimum(m, T - 1) * stride + k[:, None])
    weight = piece(weights, begin, k[None, :], K, EVEN)
    wait_for_previous(DEPENDENT)
    total = times(weight, piece(xs, begin, k[:, None], K, EVEN), tl.zeros((BN, M), tl.float32), DOT_F32)
    for low in tl.range(begin + BK, end, BK, num_stages=STAGES):
        weight = piece(weights, low, k[None, :], K, EVEN)
        total = times(weight, piece(xs, low, k[:, None], K, EVEN), total, DOT_F32)
    if SPLIT == 1:
        store_tile(total, target, first, T, N, M, BN, GATED)
    else:
        at = n * M + m
        own = sums + (tile * SPLIT).to(tl.int64) * (BN * M)
        tl.store(own + part * (BN * M) + at, total)
        if is_last_program(counters, tile, SPLIT):
            total = tl.zeros((BN, M), tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(own + other * (BN * M) + at, cache_modifier=".cg")
            store_tile(total, target, first, T, N, M, BN, GATED)
