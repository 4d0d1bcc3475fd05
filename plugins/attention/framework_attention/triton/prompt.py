"""Attention of several queries a request: prompts, chunks on a cached prefix, and every query of `batch_invariant`.

A program has a tile: some consecutive queries of one request with all heads of one KV head, as rows of one matrix
product, over their keys tile by tile. Keys of earlier steps are read from their blocks, those of this step from its own
projections, where they lie in one piece. With `batch_invariant` all are read from blocks, in tiles at fixed positions:
what a row of the product gives then depends neither on the other rows nor on how many keys the tile's last query sees,
since keys behind a query are masked, and a tile of masked keys leaves every number as it was. Called by `attention`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_attention.triton.decode import blocks_of
from framework_attention.triton.heads import LOG2_E, angles, capped, loaded, sinks_of, turned


@triton.jit
def prompt_kernel(
    new, turning, own_k, own_v, paged, columns, tiles, out, scale, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DOT_F32: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * KV_HEADS,). out [T, Hq, D]. Normalises and rotates queries itself; keys and values of the step are
    in the cache, and keys of own_k are as they are there.

    own_k, own_v  tensor descriptors of the step's keys and values, [T, Hk * D] in tiles [TILE, D]; None: all keys are
                  read from blocks, and each query gets the same operations in every tile, so the same bits
    ROWS          row r is head r % GROUP_PAD of query r // GROUP_PAD
    SOFTCAP       0 for none
    sinks         [Hq], None without: the softmax of every row begins with its head's
    """
    index, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    record = tiles + index * 8
    queries = tl.load(record)
    if queries == 0:
        return
    token, table_row = tl.load(record + 1), tl.load(record + 2)
    first, computed = tl.load(record + 3), tl.load(record + 4)
    stored: tl.constexpr = paged.kv.dtype.element_ty
    row, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    query, member = row // GROUP_PAD, row % GROUP_PAD
    is_row = ((query < queries) & (member < GROUP))[:, None] & (d < DIM)[None, :]
    query_head = head * GROUP + member
    position = first + query
    at_q = new.q + (token + query).to(tl.int64)[:, None] * new.q_stride + query_head[:, None] * DIM
    raw = loaded(at_q, turning.q_weight, turning, (query < queries)[:, None] & (member < GROUP)[:, None], DIM, DIM_PAD)
    cos, sin = angles(turning, tl.where(query < queries, position, first)[:, None], DIM, DIM_PAD)
    rows = turned(raw, turning.q_weight, turning, cos, sin, DIM)
    if not DOT_F32:
        rows = rows.to(stored)
    end = first + queries
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DIM_PAD], tl.float32),
    )
    if sinks is not None:
        state = (sinks_of(sinks, query_head, member < GROUP), state[1] + 1.0, state[2])
    scale_2 = scale * LOG2_E
    table = paged.table + table_row.to(tl.int64) * columns
    blocks = (paged.kv + head * (BLOCK_SIZE * DIM), table, first)
    if own_k is None:
        state = _attend_blocks(
            state, rows, position, blocks, begin, end, scale_2, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE, WINDOW,
            SOFTCAP, True,
        )  # fmt: skip
    else:
        whole = begin
        if WINDOW == 0:
            whole = computed // TILE * TILE
            state = _attend_blocks(
                state, rows, position, blocks, begin, whole, scale_2, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE, WINDOW,
                SOFTCAP, False,
            )  # fmt: skip
        state = _attend_blocks(
            state, rows, position, blocks, whole, computed, scale_2, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE, WINDOW,
            SOFTCAP, True,
        )  # fmt: skip
        start = tl.maximum(begin, computed)
        ahead = token - first  # token of the batch less its position
        middle = start
        if WINDOW == 0:
            middle = start + (first + 1 - start) // TILE * TILE
            state = _attend_own(
                state, rows, position, own_k, own_v, ahead, head * DIM, start, middle, end,
                scale_2, TILE, WINDOW, SOFTCAP, False,
            )  # fmt: skip
        state = _attend_own(
            state, rows, position, own_k, own_v, ahead, head * DIM, middle, end, end,
            scale_2, TILE, WINDOW, SOFTCAP, True,
        )  # fmt: skip
    _, mass, total = state
    result = total / tl.where(mass > 0, mass, 1.0)[:, None]
    to = out + (token + query).to(tl.int64)[:, None] * (KV_HEADS * GROUP * DIM) + query_head[:, None] * DIM
    tl.store(to + d[None, :], result.to(stored), mask=is_row)


@triton.jit
def _attend_blocks(
    state, q, position, blocks, begin, end, scale_2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax's (top, mass, total), moved on over cached keys begin .. end, begin at a multiple of TILE.

    blocks  KV memory of the head, the request's block table, position of the tile's first query
    MASKED False: they are whole tiles, and every query reads them all
    """
    kv, table, first = blocks
    top, mass, total = state
    d = tl.arange(0, DIM_PAD)[None, :]
    in_dim = d < DIM
    block = blocks_of(table, begin, end, BLOCK_SIZE, TILE)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        place = block.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * DIM) + (at % BLOCK_SIZE) * DIM
        block = blocks_of(table, start + TILE, end, BLOCK_SIZE, TILE)  # a turn ahead of its keys
        keys = kv + place[:, None] + d
        mask = in_dim
        if MASKED:
            mask = (at < end)[:, None] & in_dim
        if WINDOW > 0:  # a block behind the window of the tile's first query may be another request's
            mask = mask & (at > first - WINDOW)[:, None]
        k = tl.load(keys, mask=mask, other=0.0)
        v = tl.load(keys + KV_HEADS * BLOCK_SIZE * DIM, mask=mask, other=0.0)
        top, mass, total = _turn(top, mass, total, q, k, v, at, position, end, scale_2, WINDOW, SOFTCAP, MASKED)
    return top, mass, total


@triton.jit
def _attend_own(
    state, q, position, own_k, own_v, ahead, column, begin, end, last, scale_2,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As `_attend_blocks` over keys begin .. end of the step's own, of which key j is token j + ahead of the batch."""
    top, mass, total = state
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        k = own_k.load([start + ahead, column])
        v = own_v.load([start + ahead, column])
        if MASKED:  # tokens behind the last are another request's, and whatever they hold must not count
            v = tl.where((at < last)[:, None], v, 0.0)
        top, mass, total = _turn(top, mass, total, q, k, v, at, position, last, scale_2, WINDOW, SOFTCAP, MASKED)
    return top, mass, total


@triton.jit
def _turn(
    top, mass, total, q, k, v, at, position, end, scale_2,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax's numbers, moved on over the keys k, values v [TILE, D] at positions `at`."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    unit = scale_2
    if SOFTCAP > 0:
        scores = capped(scores, scale_2, SOFTCAP)
        unit = 1.0
    if MASKED:
        readable = (at[None, :] <= position[:, None]) & (at < end)[None, :]
        if WINDOW > 0:
            readable = readable & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(readable, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * unit)
    base = new_top
    if MASKED:  # no key so far: -inf - -inf is not a number
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(weights, axis=1)
    weights = weights.to(k.dtype).to(q.dtype)
    total = tl.dot(weights, v.to(q.dtype), total * shrink[:, None], input_precision="ieee")
    return new_top, mass, total
