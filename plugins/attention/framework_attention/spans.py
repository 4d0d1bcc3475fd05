"""How one step's queries are cut into batched products over blocks: host arithmetic, once a step, no KV touched.

A `Span` is a set of requests whose keys are gathered together: many decodes of about one length, or one chunk. Its
`pieces` are the products over what was gathered. Made by `plan_spans`, which `cpu.CpuAttention.plan` calls.
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

# What a further sub-batch costs (some ten small operations), in keys gathered and attended: measured on two x86 cores.
_SPLIT_COST_KEYS = 700
# Bounds of the gathered keys and of the scores of one product, so that a large step does not need large scratch memory.
_MAX_KEYS = 16384
_MAX_SCORES = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cuts depend on. block_size divides granule: lengths are rounded up to granule keys."""

    block_size: int
    granule: int
    num_heads: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """One attention product: `num_queries` query tokens of each request of the span against the first `length` keys.

    tokens  the query tokens in the batch, request by request: a slice or int64 indices
    mask    [n, num_queries, 1, length] float32, 0 or -inf
    """

    tokens: slice | Tensor
    num_queries: int
    length: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Requests whose keys are gathered together.

    blocks  [n, num_blocks] int64 physical blocks in the order of positions, padded with the null block
    """

    blocks: Tensor
    pieces: tuple[Piece, ...]


def plan_spans(starts: Ints, query_lens: Ints, seq_lens: Ints, tables: Ints, limits: Limits) -> list[Span]:
    """Spans that cover every query token of a request with seq_len > 0.

    starts      [R] first token of each request in the batch
    query_lens  [R] query tokens of each request
    seq_lens    [R] readable context, its own tokens included
    tables      [R, max_blocks] physical blocks of each request
    """
    decodes = np.flatnonzero((query_lens == 1) & (seq_lens > 0))
    chunks = np.flatnonzero((query_lens > 1) & (seq_lens > 0))
    spans = [_decode_span(starts[rows], seq_lens[rows], tables[rows], limits) for rows in _by_length(decodes, seq_lens)]
    spans += [
        _chunk_span(int(starts[row]), int(query_lens[row]), int(seq_lens[row]), tables[row], limits) for row in chunks
    ]
    return spans


def _by_length(rows: Ints, seq_lens: Ints) -> Iterator[Ints]:
    """Cuts `rows` into sub-batches of similar length, so that padding to the longest costs less than a further cut."""
    order = rows[np.argsort(-seq_lens[rows], kind="stable")]
    begin = waste = 0
    for i, length in enumerate(seq_lens[order].tolist()):
        longest = int(seq_lens[order[begin]])
        waste += longest - length
        if i > begin and (waste > _SPLIT_COST_KEYS or (i - begin + 1) * longest > _MAX_KEYS):
            yield np.sort(order[begin:i])
            begin, waste = i, 0
    if len(order):
        yield np.sort(order[begin:])


def _decode_span(tokens: Ints, seq_lens: Ints, tables: Ints, limits: Limits) -> Span:
    length = _round_up(int(seq_lens.max()), limits.granule)
    mask = _mask(seq_lens[:, None] - 1, length, limits.window)
    piece = Piece(_token_index(tokens), 1, length, mask)
    return _span(tables, seq_lens, length, (piece,), limits)


def _chunk_span(start: int, num_queries: int, seq_len: int, table: Ints, limits: Limits) -> Span:
    length = _round_up(seq_len, limits.granule)
    step = max(1, _MAX_SCORES // (length * limits.num_heads))
    first_position = seq_len - num_queries
    pieces = []
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        # Keys behind the last query of the piece are read by none of its queries.
        keys = _round_up(first_position + end, limits.granule)
        mask = _mask(np.arange(first_position + begin, first_position + end)[None], keys, limits.window)
        pieces.append(Piece(slice(start + begin, start + end), end - begin, keys, mask))
    return _span(table[None], np.array([seq_len]), length, tuple(pieces), limits)


def _span(tables: Ints, seq_lens: Ints, length: int, pieces: tuple[Piece, ...], limits: Limits) -> Span:
    num_blocks = length // limits.block_size
    columns = np.arange(num_blocks)
    used = columns < -(-seq_lens[:, None] // limits.block_size)
    # A table column behind the request's last block may name a block that is somebody else's by now.
    blocks = np.where(used, tables[:, np.minimum(columns, tables.shape[1] - 1)], NULL_BLOCK)
    return Span(torch.from_numpy(blocks), pieces)


def _mask(positions: Ints, length: int, window: int | None) -> Tensor:
    """[n, t, 1, length] for queries at `positions` [n, t]; key j is read iff position - window < j <= position."""
    keys = np.arange(length)
    readable = keys <= positions[..., None]
    if window is not None:
        readable &= keys > positions[..., None] - window
    return torch.from_numpy(np.where(readable, np.float32(0), np.float32("-inf"))).unsqueeze(2)


def _token_index(tokens: Ints) -> slice | Tensor:
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else torch.from_numpy(tokens)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
