"""Products of few rows, bound by reading the weight: `gemv_kernel` for one row, `few_rows_kernel` for up to sixteen.

The first takes residual, norm, bias and gate into its launch, the second bias and gate. Both ask for weights before
they wait for the kernel in front. They are for dtypes of 16 bits; the reference is `framework.layers.ops` around
`torch.nn.functional.linear`; shapes and launches are chosen in `cuda_linear`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment,no-redef"
# ruff: noqa: RUF005 - Triton knows the sum of tuples, not their unpacking

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.activations import silu
from framework_backends.triton.launches import let_next_begin, wait_for_previous


class Row(NamedTuple):
    """A row x [K], with a norm also its weight [K] and eps, and residual and stream [K] (the sum is written to stream),
    both None where x is the whole stream."""

    x: Any
    norm: Any
    eps: Any
    residual: Any
    stream: Any


class Target(NamedTuple):
    """weight [N, K] (gated: N gate rows, then N up rows), bias [N] (gated: [2 N]) or None, y [T, N] contiguous."""

    weight: Any
    bias: Any
    y: Any


@triton.jit
def rounded(x, pointer):
    """x as it would be read again from memory of the pointer's dtype, in float32."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def with_bias(value, target, n, limit):
    """value + bias at n, rows of the weight, rounded to the dtype of y, float32."""
    if target.bias is not None:
        value += tl.load(target.bias + n, mask=n < limit, other=0.0).to(tl.float32)
    return rounded(value, target.y)


# ------------------------------------------------------------------------------------------------------------- one row


@triton.jit
def pairs_at(pointer, place, K: tl.constexpr, EVEN: tl.constexpr):
    """Pairs of neighbours of 16 bits as uint32, 0 from K on. place counts pairs. EVEN: all lie below K."""
    pointers = pointer.to(tl.pointer_type(tl.uint32)) + place
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=place < K // 2, other=0)


@triton.jit
def weight_pairs(
    target, first, begin, limit, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BK / 8, BN, 4] pairs of BN rows of the weight from `first` on, BK columns from pair `begin` on; as `pairs_at`.

    Loaded as rows of four pairs, one below the other, so that it is plain how threads are laid over them: along the
    columns. Of a tile of three axes versions of Triton decide that differently.
    """
    four = tl.arange(0, BN * (BK // 8))[:, None]
    n = four // (BK // 8)
    place = begin + four % (BK // 8) * 4 + tl.arange(0, 4)[None, :]
    pointer = target.weight.to(tl.pointer_type(tl.uint32)) + first.to(tl.int64) * (K // 2) + (n * (K // 2) + place)
    if EVEN_N and EVEN_K:
        pairs = tl.load(pointer, eviction_policy="evict_first")
    else:
        mask = (first + n < limit) & (place < K // 2)
        pairs = tl.load(pointer, mask=mask, other=0, eviction_policy="evict_first")
    return tl.permute(tl.reshape(pairs, (BN, BK // 8, 4)), (1, 0, 2))


@triton.jit
def low_of(pair, dtype: tl.constexpr):
    """The first of each pair, float32: one operation for bfloat16, which conversions take two for."""
    if dtype == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True)
    else:
        return (pair & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def high_of(pair, dtype: tl.constexpr):
    """The second of each pair, float32."""
    if dtype == tl.bfloat16:
        return (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return (pair >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def pairs_of(low, high, dtype: tl.constexpr):
    """The pairs of which these are the first and the second, in float32 with no more bits than the dtype has."""
    first = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    return first | (high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def plus_product(total, weight, low, high, dtype: tl.constexpr, IN_TURN: tl.constexpr):
    """total [n, BN, 4] + pairs of weights by those of the row [n, 1, 4], element by element.

    A compiler makes `fma` of a product and a sum anyway: IN_TURN changes no bit, but when Triton 3.9 asks for weights.
    Plain products it gathers from all pieces into one vector, which waits for the last weight and takes the registers
    of every one; with `fma` a weight is asked for shortly before its sum, and its registers serve the next one.
    """
    if IN_TURN:
        total = tl.fma(low_of(weight, dtype), low, total)
        return tl.fma(high_of(weight, dtype), high, total)
    else:
        total += low_of(weight, dtype) * low
        return total + high_of(weight, dtype) * high


@triton.jit
def over_columns(total):
    """[n, BN, 4] -> [BN]; what a thread holds is added first."""
    return tl.sum(tl.sum(total, axis=2), axis=0)


@triton.jit
def gemv_kernel(
    row, target, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
    IN_TURN: tl.constexpr, GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN outputs,): y [N] of one row. N counts outputs (gated: half of the weight's rows).

    A row of the weight is cut into pieces of BK columns, eight neighbours to a thread; AHEAD pieces are asked for at a
    time, the first of them before the kernel in front has ended. Every program normalises the row for itself.
    """
    let_next_begin(DEPENDENT)
    CUTS: tl.constexpr = (K + BK - 1) // BK
    EVEN_K: tl.constexpr = K % BK == 0
    EVEN_N: tl.constexpr = N % BN == 0
    dtype: tl.constexpr = target.weight.dtype.element_ty
    first = tl.program_id(0) * BN
    # Threads are laid along the first axis, and have of the row what they have of the weight.
    pair = tl.arange(0, BK // 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    gates = ()
    ups = ()
    for cut in tl.static_range(CUTS if CUTS < AHEAD else AHEAD):
        begin = cut * (BK // 2)
        gates = gates + (weight_pairs(target, first, begin, N, K, BN, BK, EVEN_N, EVEN_K),)
        if GATED:
            ups = ups + (weight_pairs(target, first + N, begin, N * 2, K, BN, BK, EVEN_N, EVEN_K),)
    wait_for_previous(DEPENDENT)
    lows = ()
    highs = ()
    scale = 1.0
    if row.norm is not None:
        squares = tl.zeros((BK // 8, 1, 4), tl.float32)
        for cut in tl.static_range(CUTS):
            place = cut * (BK // 2) + pair
            x = pairs_at(row.x, place, K, EVEN_K)
            low = low_of(x, dtype)
            high = high_of(x, dtype)
            if row.residual is not None:
                carried = pairs_at(row.residual, place, K, EVEN_K)
                low = rounded(low + low_of(carried, dtype), row.x)
                high = rounded(high + high_of(carried, dtype), row.x)
                if tl.program_id(0) == 0:
                    stream = row.stream.to(tl.pointer_type(tl.uint32)) + place
                    tl.store(stream, pairs_of(low, high, dtype), mask=place < K // 2)
            squares += low * low + high * high
            lows = lows + (low,)
            highs = highs + (high,)
        scale = tl.rsqrt(tl.sum(tl.reshape(squares, (BK // 2,))) / K + row.eps)
    gate = tl.zeros((BK // 8, BN, 4), tl.float32)
    up = tl.zeros((BK // 8, BN, 4), tl.float32)
    for cut in tl.static_range(CUTS):
        if cut + AHEAD < CUTS:
            begin = (cut + AHEAD) * (BK // 2)
            gates = gates + (weight_pairs(target, first, begin, N, K, BN, BK, EVEN_N, EVEN_K),)
            if GATED:
                ups = ups + (weight_pairs(target, first + N, begin, N * 2, K, BN, BK, EVEN_N, EVEN_K),)
        place = cut * (BK // 2) + pair
        if row.norm is not None:
            factor = pairs_at(row.norm, place, K, EVEN_K)
            low = rounded(low_of(factor, dtype) * rounded(lows[cut] * scale, row.x), row.x)
            high = rounded(high_of(factor, dtype) * rounded(highs[cut] * scale, row.x), row.x)
        else:
            x = pairs_at(row.x, place, K, EVEN_K)
            low = low_of(x, dtype)
            high = high_of(x, dtype)
        gate = plus_product(gate, gates[cut], low, high, dtype, IN_TURN)
        if GATED:
            up = plus_product(up, ups[cut], low, high, dtype, IN_TURN)
    out = first + tl.arange(0, BN)
    value = with_bias(over_columns(gate), target, out, N)
    if GATED:
        value = rounded(silu(value), target.y) * with_bias(over_columns(up), target, out + N, N * 2)
    tl.store(target.y + out, value, mask=out < N)


# ------------------------------------------------------------------------------------------------------------ few rows


@triton.jit
def columns(tile, SPLIT: tl.constexpr, BLOCKS: tl.constexpr):
    """[n, 8] columns of a piece. A warp has BLOCKS times 32 neighbours, a thread 8 of each 32.

    tile  [n, 1] eights of a tile, one below the other as threads, warps and then what a thread holds are laid over
          them: of a tile of six axes versions of Triton decide that differently
    """
    quarter, warp, block = tile % 4, tile // 32 % SPLIT, tile // (32 * SPLIT) % BLOCKS
    return warp * (BLOCKS * 32) + block * 32 + quarter * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def rows_of_tile(tile, SPLIT: tl.constexpr, BLOCKS: tl.constexpr):
    """[n, 1] rows of a tile, which is as in `columns`."""
    return tile // 4 % 8 + tile // (32 * SPLIT * BLOCKS) * 8


@triton.jit
def operand(tile, ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCKS: tl.constexpr):
    """A tile [n, 8] of ROWS rows as an operand [SPLIT, ROWS, BLOCKS * 32] of a matrix product.

    The matrix units want of each thread pairs of columns that lie apart, memory gives eight neighbours at a time. Any
    order of columns gives the same product when both operands have it, so the eight neighbours of a thread stand where
    the units expect that thread's pairs: operands go from memory to registers and nowhere else.
    """
    tile = tl.reshape(tile, (ROWS // 8, BLOCKS, SPLIT, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(tile, (2, 0, 3, 1, 5, 6, 4, 7)), (SPLIT, ROWS, BLOCKS * 32))


@triton.jit
def weight_tile(
    target, first, cut, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Weights of BN outputs from `first` on, as a tile; gated: of BN / 2, gate and up rows in turn."""
    tile = tl.arange(0, BN * SPLIT * BLOCKS * 4)[:, None]
    n = rows_of_tile(tile, SPLIT, BLOCKS)
    k = cut * (SPLIT * BLOCKS * 32) + columns(tile, SPLIT, BLOCKS)
    inside = first + n < N
    EVEN_N: tl.constexpr = N % (BN // 2 if GATED else BN) == 0
    if GATED:
        inside = first + n // 2 < N
        n = n // 2 + (n % 2) * N
    pointers = target.weight + first.to(tl.int64) * K + (n * K + k)
    if EVEN_N and K % (SPLIT * BLOCKS * 32) == 0:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=inside & (k < K), other=0.0, eviction_policy="evict_first")


@triton.jit
def source_tile(x, stride, cut, T, K: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, BLOCKS: tl.constexpr):
    """Rows of x as a tile, 0 from row T on."""
    tile = tl.arange(0, M * SPLIT * BLOCKS * 4)[:, None]
    m = rows_of_tile(tile, SPLIT, BLOCKS)
    k = cut * (SPLIT * BLOCKS * 32) + columns(tile, SPLIT, BLOCKS)
    if K % (SPLIT * BLOCKS * 32) == 0:
        return tl.load(x + (m * stride + k), mask=m < T, other=0.0)
    return tl.load(x + (m * stride + k), mask=(m < T) & (k < K), other=0.0)


@triton.jit
def dot(x, weight, total, DOT_F32: tl.constexpr):
    """total + x @ weight transposed; DOT_F32 multiplies in float32, as the interpreter must."""
    weight = tl.permute(weight, (0, 2, 1))
    if DOT_F32:
        return tl.dot(x.to(tl.float32), weight.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(x, weight, total)


@triton.jit(do_not_specialize=["T"])
def few_rows_kernel(
    x, stride, target, T, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    BLOCKS: tl.constexpr, AHEAD: tl.constexpr, GATED: tl.constexpr, DOT_F32: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN rows of the weight,), SPLIT warps: y of x [T, K], T <= M. N as in `gemv_kernel`.

    The columns are cut into pieces of SPLIT * BLOCKS * 32, each shared out to the warps, whose sums are added at the
    end in a fixed order. AHEAD pieces of the weight are asked for at a time.
    """
    let_next_begin(DEPENDENT)
    CUTS: tl.constexpr = (K + SPLIT * BLOCKS * 32 - 1) // (SPLIT * BLOCKS * 32)
    OUTPUTS: tl.constexpr = BN // 2 if GATED else BN
    first = tl.program_id(0) * OUTPUTS
    weights = ()
    for cut in tl.static_range(CUTS if CUTS < AHEAD else AHEAD):
        weights = weights + (weight_tile(target, first, cut, N, K, BN, SPLIT, BLOCKS, GATED),)
    wait_for_previous(DEPENDENT)
    total = tl.zeros((SPLIT, M, BN), tl.float32)
    for cut in tl.static_range(CUTS):
        if cut + AHEAD < CUTS:
            weights = weights + (weight_tile(target, first, cut + AHEAD, N, K, BN, SPLIT, BLOCKS, GATED),)
        left = operand(source_tile(x, stride, cut, T, K, M, SPLIT, BLOCKS), M, SPLIT, BLOCKS)
        total = dot(left, operand(weights[cut], BN, SPLIT, BLOCKS), total, DOT_F32)
    value = tl.sum(total, axis=0)
    out = first + tl.arange(0, OUTPUTS)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(value, (M, OUTPUTS, 2)))
        value = rounded(silu(with_bias(gate, target, out, N)), target.y) * with_bias(up, target, out + N, N * 2)
    else:
        value = with_bias(value, target, out, N)
    m = tl.arange(0, M)[:, None]
    tl.store(target.y + m * N + out, value, mask=(m < T) & (out < N))
