"""How one step's queries are cut into batched products over blocks: host arithmetic, once a step, no KV touched.

A `Span` is one product: many decodes of about one length, or some queries of one chunk, with the keys they read. Made
by `plan_spans`, which `cpu.CpuAttention.plan` calls. Under a window the places of keys are counted from each request's
first block that is read, here and in `steady`: what lies before it is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from framework.batch import NULL_BLOCK

Ints = NDArray[np.int64]

# What a further sub-batch costs (some ten small operations), in padding keys gathered and attended: those are cheap,
# since the null block stays in the cache. Measured on two x86 cores with 32 decodes of 60 to 300 tokens.
_SPLIT_COST_KEYS = 3000
# Bounds of the gathered keys and of the scores of one product, so that a large step does not need large scratch memory.
_MAX_KEYS = 16384
_MAX_SCORES = 1 << 19
# Under a window a product of many queries has many keys that each of them may not read, one of few queries few rows:
# of 16 to 512 this took least, with 9 heads of 64 and windows of 16 to 2048, on one x86 core.
_WINDOWED_QUERIES = 64
# Room for decodes under a window to go on: all of them are about as long as it is, and one would soon enter a block.
_SPARE_KEYS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cuts depend on. block_size divides granule: lengths are rounded up to granule keys.

    max_alone  most decodes of a step that each get a span of their own
    """

    block_size: int
    granule: int
    num_heads: int
    window: int | None
    max_alone: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """One attention product: `num_queries` query tokens of each of n requests against their first keys.

    tokens    the query tokens in the batch, request by request
    num_keys  keys up to the last query of the longest request
    blocks    [n, num_blocks] int64 physical blocks in the order of positions, padded with the null block
    mask      [n, num_queries, 1, num_blocks * block_size] float32, 0 or -inf
    """

    tokens: Ints
    num_queries: int
    num_keys: int
    blocks: Tensor
    mask: Tensor


def first_places(query_lens: Ints, seq_lens: Ints, limits: Limits) -> tuple[Ints, Ints]:
    """Of each request under a window: the first key that a query reads, and a multiple of granule at or before it, from
    where places are counted. [R] each."""
    assert limits.window is not None
    needed = np.maximum(seq_lens - query_lens - limits.window + 1, 0)
    return needed, needed // limits.granule * limits.granule


def plan_spans(starts: Ints, query_lens: Ints, seq_lens: Ints, tables: Ints, limits: Limits) -> list[Span]:
    """Spans that cover every query token of a request with seq_len > 0.

    starts      [R] first token of each request in the batch
    query_lens  [R] query tokens of each request
    seq_lens    [R] readable context, its own tokens included, from the first place on
    tables      [R, max_blocks] physical blocks of each request, from the first place on
    """
    is_decode = (query_lens == 1) & (seq_lens > 0)
    if len(starts) > limits.max_alone and is_decode.all() and not _worth_cutting(seq_lens):
        return [_decode_span(starts, seq_lens, tables, limits)]
    decodes = np.flatnonzero(is_decode)
    chunks = np.flatnonzero((query_lens > 1) & (seq_lens > 0))
    parts = decodes[:, None] if len(decodes) <= limits.max_alone else _by_length(decodes, seq_lens)
    spans = [_decode_span(starts[rows], seq_lens[rows], tables[rows], limits) for rows in parts]
    for row in chunks:
        spans += _chunk_spans(int(starts[row]), int(query_lens[row]), int(seq_lens[row]), tables[row], limits)
    return spans


def _worth_cutting(seq_lens: Ints) -> bool:
    """Whether decodes of these lengths may be cut; False is certain, and spares the sorting that True leads to."""
    padded = int(seq_lens.max()) * len(seq_lens)
    return padded > _MAX_KEYS or padded - int(seq_lens.sum()) > _SPLIT_COST_KEYS


def _by_length(rows: Ints, seq_lens: Ints) -> Iterator[Ints]:
    """Cuts `rows` into sub-batches of similar length, so that padding to the longest costs less than a further cut."""
    if len(rows):
        yield from _cut(rows[np.argsort(-seq_lens[rows], kind="stable")], seq_lens)


def _cut(rows: Ints, seq_lens: Ints) -> Iterator[Ints]:
    """Cuts `rows`, longest first, where that saves most keys, as long as it saves enough."""
    lengths = seq_lens[rows]
    saved_keys = (lengths[0] - lengths) * np.arange(len(rows), 0, -1)
    best = int(saved_keys.argmax())
    if saved_keys[best] > _SPLIT_COST_KEYS:
        yield from _cut(rows[:best], seq_lens)
        yield from _cut(rows[best:], seq_lens)
        return
    step = max(1, _MAX_KEYS // int(lengths[0]))
    for begin in range(0, len(rows), step):
        yield np.sort(rows[begin : begin + step])


def _decode_span(tokens: Ints, seq_lens: Ints, tables: Ints, limits: Limits) -> Span:
    num_keys = int(seq_lens.max())
    spare = _SPARE_KEYS if limits.window is not None and len(tokens) > 1 else 0
    length = _round_up(num_keys + spare, limits.granule)
    mask = _mask(seq_lens[:, None] - 1, length, limits.window)
    return Span(tokens, 1, num_keys, _blocks(tables, length, limits), mask)


def _chunk_spans(start: int, num_queries: int, seq_len: int, table: Ints, limits: Limits) -> Iterator[Span]:
    """Cuts a chunk by queries. Each span has keys from the first one of its first query to its last query: the others
    are read by none."""
    step = _queries_of_a_span(seq_len, limits)
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        positions = np.arange(begin, end)[None] + (seq_len - num_queries)
        before = 0
        if limits.window is not None:
            before = max(0, int(positions[0, 0]) - limits.window + 1) // limits.granule * limits.granule
            positions -= before
        num_keys = int(positions[0, -1]) + 1
        length = _round_up(num_keys, limits.granule)
        mask = _mask(positions, length, limits.window)
        blocks = _blocks(table[None, before // limits.block_size :], length, limits)
        yield Span(np.arange(start + begin, start + end), end - begin, num_keys, blocks, mask)


def _queries_of_a_span(seq_len: int, limits: Limits) -> int:
    if limits.window is None:
        return max(1, _MAX_SCORES // (_round_up(seq_len, limits.granule) * limits.num_heads))
    num_keys = _round_up(min(seq_len, limits.window + _WINDOWED_QUERIES), limits.granule) + limits.granule
    return max(1, min(_WINDOWED_QUERIES, _MAX_SCORES // (num_keys * limits.num_heads)))


def _blocks(tables: Ints, length: int, limits: Limits) -> Tensor:
    """[n, length / block_size]; the null block where a request, or the table, has no further block."""
    columns, missing = length // limits.block_size, length // limits.block_size - tables.shape[1]
    if missing > 0:
        tables = np.pad(tables, ((0, 0), (0, missing)), constant_values=NULL_BLOCK)
    return torch.from_numpy(np.ascontiguousarray(tables[:, :columns]))


def _mask(positions: Ints, length: int, window: int | None) -> Tensor:
    """[n, t, 1, length] for queries at `positions` [n, t]; key j is read iff position - window < j <= position."""
    keys = np.arange(length)
    readable = keys <= positions[..., None]
    if window is not None:
        readable &= keys > positions[..., None] - window
    return torch.from_numpy(np.where(readable, np.float32(0), np.float32("-inf"))).unsqueeze(2)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fresh_blocks(query_lens: Ints, seq_lens: Ints, tables: Ints, block_size: int) -> Tensor | None:
    """Blocks whose first token this step writes and whose last it does not, None when there are none.

    They are zeroed before the write: a value left there by an earlier owner is masked, but a NaN or an infinity of his
    would still spoil the products.
    """
    last = (seq_lens - 1) // block_size
    fresh = np.flatnonzero((last * block_size >= seq_lens - query_lens) & (seq_lens % block_size != 0))
    return torch.from_numpy(tables[fresh, last[fresh]]) if len(fresh) else None
