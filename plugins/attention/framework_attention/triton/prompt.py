"""Attention of several queries a request: prompts, chunks on a cached prefix, and every query of `batch_invariant`.

A program has a tile: some consecutive queries of one request with all heads of one KV head, as rows of one matrix
product, over the keys in the cache from the first readable one on, tile by tile at fixed positions. What a row of the
product gives depends neither on the other rows nor on how many keys the tile's last query sees: keys behind a query
are masked, and a tile of masked keys leaves every number as it was. Called by `attention`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_attention.triton.decode import LOG2_E


@triton.jit
def prompt_kernel(
    q, q_stride, paged, columns, tiles, out, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * KV_HEADS,). q, out [T, Hq, D]; rotated, and the step's keys and values are in the cache.

    ROWS rows: row r is head r % GROUP_PAD of query r // GROUP_PAD. SPLIT: keys that every query of the tile reads are
    attended without masks; False gives each query the same operations in every tile, so the same bits
    """
    index, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    record = tiles + index * 8
    queries, token, table_row, first = (
        tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    )  # fmt: skip
    stored: tl.constexpr = paged.kv.dtype.element_ty
    row, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    query, member = row // GROUP_PAD, row % GROUP_PAD
    is_row = (query < queries) & (member < GROUP)
    in_dim = (d < DIM)[None, :]
    query_head = head * GROUP + member
    at_q = q + (token + query).to(tl.int64)[:, None] * q_stride + query_head[:, None] * DIM + d[None, :]
    queries_of_rows = tl.load(at_q, mask=is_row[:, None] & in_dim, other=0.0)
    if DOT_F32:
        queries_of_rows = queries_of_rows.to(tl.float32)
    position = first + query
    end = first + queries
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DIM_PAD], tl.float32),
    )
    keys = paged.kv + head * (BLOCK_SIZE * DIM) + d[None, :]
    table = paged.table + table_row.to(tl.int64) * columns
    middle = begin
    if SPLIT and WINDOW == 0:
        middle = (first + 1) // TILE * TILE
        state = _attend(
            state, queries_of_rows, keys, table, position, begin, middle, scale * LOG2_E, in_dim,
            KV_HEADS, DIM, BLOCK_SIZE, TILE, WINDOW, False, DOT_F32,
        )  # fmt: skip
    _, mass, total = _attend(
        state, queries_of_rows, keys, table, position, middle, end, scale * LOG2_E, in_dim,
        KV_HEADS, DIM, BLOCK_SIZE, TILE, WINDOW, True, DOT_F32,
    )  # fmt: skip
    result = total / tl.where(mass > 0, mass, 1.0)[:, None]
    to = out + (token + query).to(tl.int64)[:, None] * (KV_HEADS * GROUP * DIM) + query_head[:, None] * DIM
    tl.store(to + d[None, :], result.to(stored), mask=is_row[:, None] & in_dim)


@triton.jit
def _attend(
    state, q, keys, table, position, begin, end, scale_2, in_dim,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """The softmax's (top, mass, total), moved on over keys begin .. end. Without masks end - begin is whole tiles."""
    stored: tl.constexpr = keys.dtype.element_ty
    top, mass, total = state
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            place = block * (2 * KV_HEADS * BLOCK_SIZE * DIM) + (start % BLOCK_SIZE + tl.arange(0, TILE)) * DIM
        elif MASKED:
            block = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)
            place = block * (2 * KV_HEADS * BLOCK_SIZE * DIM) + (at % BLOCK_SIZE) * DIM
        else:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
            place = block * (2 * KV_HEADS * BLOCK_SIZE * DIM) + (at % BLOCK_SIZE) * DIM
        values = keys + KV_HEADS * BLOCK_SIZE * DIM
        if MASKED:
            mask = (at < end)[:, None] & in_dim
            k = tl.load(keys + place[:, None], mask=mask, other=0.0)
            v = tl.load(values + place[:, None], mask=mask, other=0.0)
        else:
            k = tl.load(keys + place[:, None], mask=in_dim, other=0.0)
            v = tl.load(values + place[:, None], mask=in_dim, other=0.0)
        if DOT_F32:
            scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee") * scale_2
        else:
            scores = tl.dot(q, tl.trans(k)) * scale_2
        if MASKED:
            readable = at[None, :] <= position[:, None]
            if WINDOW > 0:
                readable = readable & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(readable, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = new_top
        if MASKED:  # no key so far: -inf - -inf is not a number
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, axis=1)
        if DOT_F32:
            weights = weights.to(stored).to(tl.float32)
            total = tl.dot(weights, v.to(tl.float32), total * shrink[:, None], input_precision="ieee")
        else:
            total = tl.dot(weights.to(stored), v, total * shrink[:, None])
        top = new_top
    return top, mass, total
