"""Products of tokens with the experts that they chose, grouped by expert, and the weighted sum of what comes out.

A tile has pairs of one expert (`experts_route`), and its program multiplies them by a block of that expert's weight:
one chain of matrix instructions over the columns, from the first to the last. An instruction adds 16 columns of 16 bits
to the sum whatever the tile's shape, and whichever operand is the tall one, so that a pair's bits do not depend on its
tile; columns behind the last one are zeros, which add nothing. The reference is `framework.layers.experts`; tiles are
chosen in `cuda_experts`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment,no-redef"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.experts_route import real_tokens
from framework_backends.triton.launches import let_next_begin, wait_for_previous
from framework_backends.triton.products import rounded


class Expert(NamedTuple):
    """weight, matrices [N, K]: one an expert, or two, the gates' and then the ups'; bias [N] of each, or None."""

    weight: Any
    bias: Any


@triton.jit
def sigmoid(x):
    return 1.0 / (tl.exp(-x) + 1.0)


@triton.jit
def activated(gate, up, limit):
    """`activate` of `layers.experts`, float32; limit None is "silu"."""
    if limit is None:
        return gate * sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * sigmoid(gate * 1.702)


@triton.jit
def weight_pointers(weight, matrix, first, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] pointers to the first columns of a matrix [N, K], from row `first` on. Rows beyond the end are read as
    the last one, and never stored."""
    row = tl.minimum(first + tl.arange(0, BN), N - 1)
    return weight + matrix.to(tl.int64) * (N * K) + (row * K)[:, None] + tl.arange(0, BK)[None, :]


@triton.jit
def joined_block(weight, matrix, first, low, BN: tl.constexpr, BK: tl.constexpr):
    """[2 BN, BK] from row `first` and column `low` on of a matrix, and behind them of the next one; 0 from its ends on.
    weight: a descriptor in blocks [2, BN, BK]."""
    return tl.reshape(weight.load([matrix, first, low]), (2 * BN, BK))


@triton.jit
def parted(total, BM: tl.constexpr, BN: tl.constexpr):
    """(gates, ups), [BM, BN] each, of [BM, 2 BN]."""
    return tl.split(tl.permute(tl.reshape(total, (BM, 2, BN)), (0, 2, 1)))


@triton.jit
def row_pieces(pointers, low, K: tl.constexpr, BK: tl.constexpr):
    """What stands BK columns wide `low` behind the pointers, 0 from K on."""
    if K % BK == 0:
        return tl.load(pointers + low)
    else:
        return tl.load(pointers + low, mask=(low + tl.arange(0, BK) < K)[None, :], other=0.0)


@triton.jit
def plus_product(x, weight, total, TALL: tl.constexpr, DOT_F32: tl.constexpr):
    """total + x [BM, BK] @ weight [BN, BK] transposed; TALL: all of it transposed, the weight being the tall operand.
    DOT_F32 multiplies in float32, as the interpreter must."""
    if DOT_F32:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if TALL:
        return tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(weight), total, input_precision="ieee")


@triton.jit
def settled(total, bias, matrix, n, N: tl.constexpr, TALL: tl.constexpr, y):
    """[BM, BN] float32 of a finished product: with bias, and rounded to the dtype of y."""
    value = tl.trans(total) if TALL else total
    if bias is not None:
        value += tl.load(bias + matrix * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return rounded(value, y)


@triton.jit
def tile_product(
    x, stride, weight, bias, by_expert, y, T, limit, record, first, N: tl.constexpr, K: tl.constexpr,
    CHOICES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    TALL: tl.constexpr, GATED: tl.constexpr, JOINED: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Outputs [BM, BN] from `first` on of the pairs of a tile, whose record is as in `Sorted`; as `grouped_kernel`."""
    index, begin, count, place = record
    m = tl.arange(0, BM)
    # Rows beyond the tile are read as its first one, and never stored.
    own = tl.where(m < count, m, 0)
    pair = tl.load(by_expert.pairs + index * T + begin + own)
    source = pair // CHOICES if GATED else place + own
    target = place + m if GATED else pair
    xs = x + source.to(tl.int64)[:, None] * stride + tl.arange(0, BK)[None, :]
    matrix = index * 2 if GATED else index
    n = first + tl.arange(0, BN)
    if JOINED:
        total = tl.zeros((BM, 2 * BN), tl.float32)
        for low in tl.range(0, K, BK, num_stages=STAGES):
            piece = row_pieces(xs, low, K, BK)
            total = plus_product(piece, joined_block(weight, matrix, first, low, BN, BK), total, False, DOT_F32)
        gate, up = parted(total, BM, BN)
    else:
        gates = weight_pointers(weight, matrix, first, N, K, BN, BK)
        ups = weight_pointers(weight, matrix + 1, first, N, K, BN, BK) if GATED else None
        gate = tl.zeros((BN, BM) if TALL else (BM, BN), tl.float32)
        up = tl.zeros((BN, BM) if TALL else (BM, BN), tl.float32)
        for low in tl.range(0, K, BK, num_stages=STAGES):
            piece = row_pieces(xs, low, K, BK)
            gate = plus_product(piece, row_pieces(gates, low, K, BK), gate, TALL, DOT_F32)
            if GATED:
                up = plus_product(piece, row_pieces(ups, low, K, BK), up, TALL, DOT_F32)
    value = settled(gate, bias, matrix, n, N, TALL, y)
    if GATED:
        value = activated(value, settled(up, bias, matrix + 1, n, N, TALL, y), limit)
    tl.store(y + target.to(tl.int64)[:, None] * N + n[None, :], value, mask=(m < count)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["most", "T"])
def grouped_kernel(
    x, stride, weight, bias, by_expert, most, y, T, limit, N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    TALL: tl.constexpr, GATED: tl.constexpr, JOINED: tl.constexpr, HALVES: tl.constexpr, DOT_F32: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (most * blocks of BN outputs,), most: tiles that there may be.

    GATED: x [T, K] -> y [pairs, N], activated, by place among the pairs of all experts. Else x [pairs, K] by that place
    -> y [T * CHOICES, N] by pair. WIDTH blocks of outputs go side by side over all tiles before the next ones, so that
    both operands stay in cache. HALVES: a tile that is half empty is computed as one of BM / 2 pairs. Programs beyond
    the tiles that there are end at once.

    weight  matrices [N, K], one an expert, GATED two, the gates' and then the ups'
    bias    [N] of each, or None
    JOINED  of GATED, not TALL: both are one product of 2 BN outputs, and weight is a descriptor in blocks [2, BN, BK]
            (an argument of its own, since in a tuple launches do not find it)
    """
    let_next_begin(DEPENDENT)
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    wait_for_previous(DEPENDENT)
    program = tl.program_id(0)
    group = program // (most * WIDTH)
    width = tl.minimum(BLOCKS - group * WIDTH, WIDTH)
    within = program - group * (most * WIDTH)
    tile = within // width
    first = (group * WIDTH + within % width) * BN
    # Asked for before it is known whether there is such a tile: each wait in a row is a part of a short program's time.
    at = by_expert.tiles + tile * 4
    record = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    if tile >= tl.load(by_expert.count):
        return
    if HALVES and record[2] <= BM // 2:
        tile_product(
            x, stride, weight, bias, by_expert, y, T, limit, record, first, N, K, CHOICES, BM // 2, BN, BK, STAGES,
            TALL, GATED, JOINED, DOT_F32,
        )  # fmt: skip
    else:
        tile_product(
            x, stride, weight, bias, by_expert, y, T, limit, record, first, N, K, CHOICES, BM, BN, BK, STAGES,
            TALL, GATED, JOINED, DOT_F32,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    outputs, weights, other, out, num_tokens, T, H: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of BLOCK columns): out [T, H], the sum of outputs [T, CHOICES, H] times weights [T, CHOICES], one
    choice after the other in float32, and of other [T, H] unless that is None; 0 for padding."""
    let_next_begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT)
    is_read = h < tl.where(token < real_tokens(num_tokens, T), H, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        weight = tl.load(weights + pair)
        total += tl.load(outputs + pair * H + h, mask=is_read, other=0.0).to(tl.float32) * weight
    if other is not None:
        total += tl.load(other + token * H + h, mask=is_read, other=0.0).to(tl.float32)
    tl.store(out + token * H + h, tl.where(is_read, total, 0.0), mask=h < H)
