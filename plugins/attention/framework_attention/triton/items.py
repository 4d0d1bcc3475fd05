"""The work items of a step, made on the device from its lengths: one launch a step, shared by all layers.

An item is a part of one decode's keys. Parts are cut so that all programs have about equally many keys, and their
number is bounded by the shape of the step alone, so that a captured step serves any lengths. Prompts' tiles are listed
by the same launch. `attention.TritonPlan` calls it; the kernels of `decode` and `prompt` read the records.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 8
"""int32 values of a record. Of an item: parts, part, token, table row, first key, end of keys, length, not used; parts
= 0 marks a record that is not used. Keys are those in the cache: the token's own is not among them. Of a tile: queries,
first token, table row, position of the first query, keys of earlier steps; queries = 0 marks one that is not used."""


def listed_rows(num_rows: int) -> int:
    """Rows that a launch is compiled for, for 1 to 512 one of three numbers: each is another kernel to wait for."""
    rows = 32
    while rows < num_rows:
        rows *= 4
    return rows


class StepRows(NamedTuple):
    """Device tensors of a step, by batch row. query_start_loc is None when row r computes token r alone."""

    seq_lens: Tensor
    idx_mapping: Tensor
    query_start_loc: Tensor | None


@triton.jit(do_not_specialize=["num_rows", "max_items", "max_tiles", "programs"])
def items_kernel(
    rows, num_rows, items, max_items, tiles, max_tiles, programs, num_sms, KV_HEADS: tl.constexpr,
    GOOD_KEYS: tl.constexpr, MIN_KEYS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1,). items [max_items, WIDTH], tiles [max_tiles, WIDTH] int32; of one that is not used, `parts` or
    `queries` alone.

    programs  how many programs decodes are cut for at most; num_sms: and at least, with MIN_KEYS each; between the two
    no program is aimed at fewer than GOOD_KEYS
    TILE      keys that parts are multiples of
    WINDOW    readable positions, 0 for all
    QUERIES   of a prompt's tile, 0 without prompts
    LEAST     fewest queries of what counts as a prompt: 2, or 1 when a decode does as well
    """
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    length = tl.load(rows.seq_lens + row, mask=is_row, other=0).to(tl.int32)
    table_row = tl.load(rows.idx_mapping + row, mask=is_row, other=0).to(tl.int32)
    token, queries = row, is_row.to(tl.int32)
    if rows.query_start_loc is not None:
        token = tl.load(rows.query_start_loc + row, mask=is_row, other=0).to(tl.int32)
        queries = tl.load(rows.query_start_loc + row + 1, mask=is_row, other=0).to(tl.int32) - token
    num_items = _cut_decodes(
        items,
        (queries == 1) & (LEAST == 2),
        token,
        table_row,
        length,
        programs,
        num_sms,
        KV_HEADS,
        GOOD_KEYS,
        MIN_KEYS,
        TILE,
        WINDOW,
    )
    _mark_unused(items, num_items, max_items, BLOCK)
    if QUERIES > 0:
        num_tiles = _list_tiles(tiles, queries, token, table_row, length, QUERIES, LEAST)
        _mark_unused(tiles, num_tiles, max_tiles, BLOCK)


@triton.jit
def _mark_unused(records, first, end, BLOCK: tl.constexpr):
    """Records first .. end, whose first value is 0 then."""
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(records + at * 8, at * 0, mask=at < end)


@triton.jit
def _cut_decodes(
    items, is_decode, token, table_row, length, programs, num_sms, KV_HEADS: tl.constexpr, GOOD_KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Writes the items of all decodes, in the order of rows; how many there are.

    A decode of n keys gets n / chunk parts, rounded, at least 1. So there are at most as many items as decodes and
    total / chunk together.
    """
    end = tl.maximum(length - 1, 0)
    first = end * 0
    if WINDOW > 0:  # aligned to the tile, so that a tile never lies in two blocks; the kernel masks what is before
        first = tl.minimum(tl.maximum(length - WINDOW, 0) // TILE * TILE, end)
    keys = tl.where(is_decode, end - first, 0)
    total = tl.sum(keys.to(tl.int64), axis=0)
    work = total * KV_HEADS
    fewest = tl.minimum(tl.maximum((work + num_sms - 1) // num_sms, MIN_KEYS), GOOD_KEYS)
    chunk = tl.maximum((work + programs - 1) // programs, fewest).to(tl.int32)
    parts = tl.maximum((keys + chunk // 2) // chunk, 1)
    each = tl.maximum((((keys + parts - 1) // parts) + TILE - 1) // TILE, 1) * TILE
    parts = tl.where(is_decode, tl.maximum((keys + each - 1) // each, 1), 0)
    at = tl.cumsum(parts, axis=0) - parts
    for part in range(tl.max(parts, axis=0)):
        record = items + (at + part) * 8
        is_part = part < parts
        begin = first + part * each
        tl.store(record, parts, mask=is_part)
        tl.store(record + 1, part + at * 0, mask=is_part)
        tl.store(record + 2, token, mask=is_part)
        tl.store(record + 3, table_row, mask=is_part)
        tl.store(record + 4, begin, mask=is_part)
        tl.store(record + 5, tl.minimum(begin + each, end), mask=is_part)
        tl.store(record + 6, length, mask=is_part)
    return tl.sum(parts, axis=0)


@triton.jit
def _list_tiles(tiles, queries, token, table_row, length, QUERIES: tl.constexpr, LEAST: tl.constexpr):
    """Writes the tiles of all prompts; those that see most keys of their prompt come first in it, to end evenly. How
    many there are."""
    count = tl.where(queries >= LEAST, (queries + QUERIES - 1) // QUERIES, 0)
    at = tl.cumsum(count, axis=0) - count
    for i in range(tl.max(count, axis=0)):
        is_tile = i < count
        start = (count - 1 - i) * QUERIES
        record = tiles + (at + i) * 8
        tl.store(record, tl.minimum(queries - start, QUERIES), mask=is_tile)
        tl.store(record + 1, token + start, mask=is_tile)
        tl.store(record + 2, table_row, mask=is_tile)
        tl.store(record + 3, length - queries + start, mask=is_tile)
        tl.store(record + 4, length - queries, mask=is_tile)
    return tl.sum(count, axis=0)
