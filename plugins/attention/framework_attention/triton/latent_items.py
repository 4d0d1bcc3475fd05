"""What a step of latent attention computes, listed on the device from its lengths: one launch a step for all layers.

Queries that are absorbed are listed one by one with the parts that their keys are cut into; prompts that are expanded
get tiles of queries and a place among the keys that are expanded together. Called by `latent.LatentTritonPlan`; the
kernels of `latent_products`, `latent_decode` and `latent_prompt` read the lists.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 8
"""int32 values of a record. Of a part: parts of its query, its place among them, query, first key, end of keys; parts
= 0 marks a record that is not used. Of a tile: queries, first token, position of the first query, place of the
request's key 0 among the expanded ones; queries = 0 marks one that is not used."""


class Queries(NamedTuple):
    """The absorbed queries of a step, [J] int32 each.

    token   row of the step's tensors
    row     of the block table
    length  keys that it reads, its own included: 0 for padding, -1 for a place that holds no query
    first   record of its first part
    """

    token: Tensor
    row: Tensor
    length: Tensor
    first: Tensor


class LatentRows(NamedTuple):
    """Device tensors of a step, by batch row. query_start_loc is None when row r computes token r alone."""

    seq_lens: Tensor
    idx_mapping: Tensor
    query_start_loc: Tensor | None


@triton.jit
def _of_rows(rows, num_rows, place):
    """(token, row of the block table, length) of the query of each row that computes one token."""
    is_row = place < num_rows
    length = tl.load(rows.seq_lens + place, mask=is_row, other=0).to(tl.int32)
    table_row = tl.load(rows.idx_mapping + place, mask=is_row, other=0).to(tl.int32)
    token, is_query = place, is_row
    if rows.query_start_loc is not None:
        token = tl.load(rows.query_start_loc + place, mask=is_row, other=0).to(tl.int32)
        queries = tl.load(rows.query_start_loc + place + 1, mask=is_row, other=0).to(tl.int32) - token
        is_query = is_row & (queries == 1)
    return token, table_row, tl.where(is_query, length, -1)


@triton.jit
def _of_tokens(rows, num_rows, place, LOG_ROWS: tl.constexpr):
    """(token, row of the block table, length) of every token: its row is the last that begins at it or before."""
    row = place * 0
    for bit in tl.static_range(LOG_ROWS - 1, -1, -1):  # bisection
        later = row + (1 << bit)
        begins = tl.load(rows.query_start_loc + later, mask=later < num_rows, other=0)
        row = tl.where((later < num_rows) & (begins <= place), later, row)
    has_row = row < num_rows  # false where there is none at all
    behind = tl.load(rows.query_start_loc + row + 1, mask=has_row, other=0).to(tl.int32)
    is_told = (place < behind) & has_row
    seq_len = tl.load(rows.seq_lens + row, mask=is_told, other=0).to(tl.int32)
    table_row = tl.load(rows.idx_mapping + row, mask=is_told, other=0).to(tl.int32)
    length = tl.where(is_told & (seq_len > 0), seq_len - (behind - 1 - place), 0)
    return place, table_row, length


@triton.jit(do_not_specialize=["num_rows", "first_query", "num_queries", "max_parts", "programs"])
def list_queries_kernel(
    rows, num_rows, queries, first_query, num_queries, parts, max_parts, programs, num_sms,
    GROUPS: tl.constexpr, GOOD_KEYS: tl.constexpr, MIN_KEYS: tl.constexpr, TILE: tl.constexpr,
    LOG_ROWS: tl.constexpr, PLACES: tl.constexpr, EACH_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1,). queries: `Queries` of num_queries places; parts [max_parts, WIDTH] int32. 2^LOG_ROWS rows at most.

    programs    how many programs the keys are cut for at most, num_sms at least with MIN_KEYS each; between the two
                no program is aimed at fewer than GOOD_KEYS. GROUPS programs share a part, each with some of the heads
    EACH_TOKEN  tokens first_query .. first_query + num_queries are the queries; else each row that computes one token
    """
    place = tl.arange(0, PLACES)
    if EACH_TOKEN:
        token, table_row, length = _of_tokens(rows, num_rows, first_query + place, LOG_ROWS)
    else:
        token, table_row, length = _of_rows(rows, num_rows, place)
    is_place = place < num_queries
    is_query = is_place & (length >= 0)
    keys = tl.maximum(length, 0)
    work = tl.sum(keys.to(tl.int64), axis=0) * GROUPS
    fewest = tl.minimum(tl.maximum((work + num_sms - 1) // num_sms, MIN_KEYS), GOOD_KEYS)
    chunk = tl.maximum((work + programs - 1) // programs, fewest).to(tl.int32)
    count = tl.maximum((keys + chunk // 2) // chunk, 1)
    each = tl.maximum((((keys + count - 1) // count) + TILE - 1) // TILE, 1) * TILE
    count = tl.where(is_query, tl.maximum((keys + each - 1) // each, 1), 0)
    first = tl.cumsum(count, axis=0) - count
    tl.store(queries.token + place, token, mask=is_place)
    tl.store(queries.row + place, table_row, mask=is_place)
    tl.store(queries.length + place, length, mask=is_place)
    tl.store(queries.first + place, first, mask=is_place)
    for part in range(tl.max(count, axis=0)):
        record = parts + (first + part) * 8
        is_part = part < count
        tl.store(record, count, mask=is_part)
        tl.store(record + 1, part + place * 0, mask=is_part)
        tl.store(record + 2, place, mask=is_part)
        tl.store(record + 3, part * each, mask=is_part)
        tl.store(record + 4, tl.minimum((part + 1) * each, keys), mask=is_part)
    _mark_unused(parts, tl.sum(count, axis=0), max_parts, BLOCK)


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def list_prompts_kernel(
    rows, num_rows, tiles, max_tiles, starts,
    QUERIES: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1,). Tiles of rows with two queries or more; those that see most keys come first in a row.

    starts [num_rows] int32: place of each row's key 0 among all expanded ones, a multiple of ALIGN
    """
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    length = tl.load(rows.seq_lens + row, mask=is_row, other=0).to(tl.int32)
    token = tl.load(rows.query_start_loc + row, mask=is_row, other=0).to(tl.int32)
    queries = tl.load(rows.query_start_loc + row + 1, mask=is_row, other=0).to(tl.int32) - token
    is_prompt = queries > 1
    taken = tl.where(is_prompt, (length + ALIGN - 1) // ALIGN * ALIGN, 0)
    start = tl.cumsum(taken, axis=0) - taken
    tl.store(starts + row, start, mask=is_row)
    count = tl.where(is_prompt, (queries + QUERIES - 1) // QUERIES, 0)
    at = tl.cumsum(count, axis=0) - count
    for i in range(tl.max(count, axis=0)):
        is_tile = i < count
        begin = (count - 1 - i) * QUERIES
        record = tiles + (at + i) * 8
        tl.store(record, tl.minimum(queries - begin, QUERIES), mask=is_tile)
        tl.store(record + 1, token + begin, mask=is_tile)
        tl.store(record + 2, length - queries + begin, mask=is_tile)
        tl.store(record + 3, start, mask=is_tile)
    _mark_unused(tiles, tl.sum(count, axis=0), max_tiles, BLOCK)


@triton.jit
def _mark_unused(records, first, end, BLOCK: tl.constexpr):
    """Records first .. end, whose first value is 0 then."""
    for begin in range(first, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(records + at * 8, at * 0, mask=at < end)
