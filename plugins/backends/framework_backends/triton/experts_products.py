"""Products of tokens with the experts that they chose, grouped by expert, and the weighted sum of what comes out.

A tile has pairs of one expert (`experts_route`), and its program multiplies them by a block of that expert's weight:
one chain of matrix instructions over the columns, from the first to the last, so that a pair's bits do not depend on
its tile. The reference is `framework.layers.experts`; tiles are chosen in `cuda_experts`.
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
    """weight, matrices [N, K]: one an expert, or two, the gates' and then the ups', or a descriptor of them in blocks
    [1, BN, BK]; bias [N] of each, or None."""

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
def weight_pointers(expert, matrix, first, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] pointers to the first columns of a matrix [N, K], from row `first` on. Rows beyond the end are read as
    the last one, and never stored."""
    row = tl.minimum(first + tl.arange(0, BN), N - 1)
    return expert.weight + matrix.to(tl.int64) * (N * K) + (row * K)[:, None] + tl.arange(0, BK)[None, :]


@triton.jit
def row_pieces(pointers, low, K: tl.constexpr, BK: tl.constexpr):
    """What stands BK columns wide `low` behind the pointers, 0 from K on."""
    if K % BK == 0:
        return tl.load(pointers + low)
    else:
        return tl.load(pointers + low, mask=(low + tl.arange(0, BK) < K)[None, :], other=0.0)


@triton.jit
def weight_block(
    expert, pointers, matrix, first, low, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr
):
    """[BN, BK] of a matrix at columns from `low` on, 0 from K on."""
    if DESCRIBED:
        return tl.reshape(expert.weight.load([matrix, first, low]), (BN, BK))
    else:
        return row_pieces(pointers, low, K, BK)


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
def settled(total, expert, matrix, n, N: tl.constexpr, TALL: tl.constexpr, y):
    """[BM, BN] float32 of a finished product: with bias, and rounded to the dtype of y."""
    value = tl.trans(total) if TALL else total
    if expert.bias is not None:
        value += tl.load(expert.bias + matrix * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return rounded(value, y)


@triton.jit
def tile_product(
    x, stride, expert, by_expert, y, T, limit, tile, first, N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    TALL: tl.constexpr, GATED: tl.constexpr, DESCRIBED: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Outputs [BM, BN] from `first` on of the pairs of a tile, as `grouped_kernel`."""
    index = tl.load(tile)
    begin = tl.load(tile + 1)
    count = tl.load(tile + 2)
    place = tl.load(tile + 3)
    m = tl.arange(0, BM)
    # Rows beyond the tile are read as its first one, and never stored.
    own = tl.where(m < count, m, 0)
    pair = tl.load(by_expert.pairs + index * T + begin + own)
    source = pair // CHOICES if GATED else place + own
    target = place + m if GATED else pair
    xs = x + source.to(tl.int64)[:, None] * stride + tl.arange(0, BK)[None, :]
    gates = None
    ups = None
    matrix = index * 2 if GATED else index
    if not DESCRIBED:
        gates = weight_pointers(expert, matrix, first, N, K, BN, BK)
        if GATED:
            ups = weight_pointers(expert, matrix + 1, first, N, K, BN, BK)
    gate = tl.zeros((BN, BM) if TALL else (BM, BN), tl.float32)
    up = tl.zeros((BN, BM) if TALL else (BM, BN), tl.float32)
    for low in tl.range(0, K, BK, num_stages=STAGES):
        piece = row_pieces(xs, low, K, BK)
        weight = weight_block(expert, gates, matrix, first, low, K, BN, BK, DESCRIBED)
        gate = plus_product(piece, weight, gate, TALL, DOT_F32)
        if GATED:
            weight = weight_block(expert, ups, matrix + 1, first, low, K, BN, BK, DESCRIBED)
            up = plus_product(piece, weight, up, TALL, DOT_F32)
    n = first + tl.arange(0, BN)
    value = settled(gate, expert, matrix, n, N, TALL, y)
    if GATED:
        value = activated(value, settled(up, expert, matrix + 1, n, N, TALL, y), limit)
    tl.store(y + target.to(tl.int64)[:, None] * N + n[None, :], value, mask=(m < count)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["T"])
def grouped_kernel(
    x, stride, expert, by_expert, y, T, limit, N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    TALL: tl.constexpr, GATED: tl.constexpr, DESCRIBED: tl.constexpr, HALVES: tl.constexpr,
    DOT_F32: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (most tiles * blocks of BN outputs,).

    GATED: x [T, K] -> y [pairs, N], activated, by place among the pairs of all experts. Else x [pairs, K] by that place
    -> y [T * CHOICES, N] by pair. WIDTH blocks of outputs go side by side over all tiles before the next ones, so that
    both operands stay in cache. HALVES: a tile that is half empty is computed as one of BM / 2 pairs. Programs beyond
    the tiles that there are end at once.
    """
    let_next_begin(DEPENDENT)
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    wait_for_previous(DEPENDENT)
    num_tiles = tl.load(by_expert.count)
    program = tl.program_id(0)
    if program >= num_tiles * BLOCKS:
        return
    group = program // (num_tiles * WIDTH)
    width = tl.minimum(BLOCKS - group * WIDTH, WIDTH)
    within = program - group * (num_tiles * WIDTH)
    tile = by_expert.tiles + (within // width) * 4
    first = (group * WIDTH + within % width) * BN
    if HALVES and tl.load(tile + 2) <= BM // 2:
        tile_product(
            x, stride, expert, by_expert, y, T, limit, tile, first, N, K, CHOICES, BM // 2, BN, BK, STAGES,
            TALL, GATED, DESCRIBED, DOT_F32,
        )  # fmt: skip
    else:
        tile_product(
            x, stride, expert, by_expert, y, T, limit, tile, first, N, K, CHOICES, BM, BN, BK, STAGES,
            TALL, GATED, DESCRIBED, DOT_F32,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    outputs, weights, out, num_tokens, T, H: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of BLOCK columns): out [T, H], the sum of outputs [T, CHOICES, H] times weights [T, CHOICES], one
    choice after the other in float32; 0 for padding."""
    let_next_begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT)
    is_read = (h < H) & (token < real_tokens(num_tokens, T))
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        weight = tl.load(weights + pair)
        total += tl.load(outputs + pair * H + h, mask=is_read, other=0.0).to(tl.float32) * weight
    tl.store(out + token * H + h, tl.where(is_read, total, 0.0), mask=h < H)
