"""Decodes that go on: the spans of a step follow from those of the step before instead of being made anew.

Between two steps of the same requests every context is one key longer, and now and then a request enters its next
block. Right after a forward pass nothing of the host's code is in the caches, so what a step does not do counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from framework.batch import NULL_BLOCK, InputBatch
from framework_attention.spans import Ints, Span


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks that requests of one span enter: `blocks[i]` stands at `columns[i]` of the span's request `places[i]`.

    is_left  whether they are left instead, behind the windows of the requests: the null block stands there then
    """

    span: int
    places: Ints
    columns: Ints
    blocks: Ints
    is_left: bool = False


class SteadyDecodes:
    """The course of a step in which every request decodes one token, for as long as the same requests go on.

    Knows the spans' masks, which it moves on in place: by a key at their end, and under a window by one at their
    beginning. age: steps by which the course has moved on.

    seq_lens  [R] readable context from the first place on
    firsts    [R] the first place of each request, None for 0
    """

    def __init__(
        self, spans: Sequence[Span], seq_lens: Ints, firsts: Ints | None, block_size: int, window: int | None
    ) -> None:
        self._block_size, self._window = block_size, window
        self._seq_lens, self._firsts = seq_lens.copy(), firsts  # the batch's own change with it
        self.age = 0
        self._room = min([span.blocks.shape[1] * block_size - span.num_keys for span in spans], default=0)
        self._masks = [_Mask(span, seq_lens, window) for span in spans]
        # A request enters a block at the ages that leave this rest: its new key is the first of a block then.
        self._entering = _by_rest(spans, (1 - seq_lens) % block_size, block_size)
        # And it leaves one behind at these, once it is longer than its window: its first key is the first of a block.
        self._leaving = None if window is None else _by_rest(spans, (window - seq_lens) % block_size, block_size)

    def advance(self, batch: InputBatch, group: int) -> list[NewBlocks] | None:
        """Moves the masks on by one key; the blocks that were entered or left, or None when a span has no room for it.

        batch: the next step; of what it holds in tensors nothing is read while no block is entered.
        """
        if self.age >= self._room:
            return None
        self.age += 1
        for mask in self._masks:
            mask.admit_next()
        rest = self.age % self._block_size
        changed = [self._enter(batch, group, *one) for one in self._entering[rest]]
        if self._leaving is not None:
            changed += [self._leave(*one) for one in self._leaving[rest]]
        return changed

    def _enter(self, batch: InputBatch, group: int, span: int, places: Ints, batch_rows: Ints) -> NewBlocks:
        positions = batch.seq_lens.numpy()[batch_rows] - 1
        blocks = batch.block_table[group].numpy()[batch.rows_np[batch_rows], positions // self._block_size]
        if self._firsts is not None:
            positions = positions - self._firsts[batch_rows]
        return NewBlocks(span, places, positions // self._block_size, blocks.astype(np.int64))

    def _leave(self, span: int, places: Ints, batch_rows: Ints) -> NewBlocks:
        assert self._window is not None
        num_left = (self._seq_lens[batch_rows] + self.age - self._window) // self._block_size
        is_any = num_left > 0
        columns = num_left[is_any] - 1
        return NewBlocks(span, places[is_any], columns, np.full_like(columns, NULL_BLOCK), is_left=True)


class _Mask:
    """The mask of one span, and where in it the last key of each request stands."""

    __slots__ = ("_begin", "_flat", "_last", "_window")

    def __init__(self, span: Span, seq_lens: Ints, window: int | None) -> None:
        self._flat = span.mask.numpy().reshape(-1)  # the same memory
        self._begin = np.arange(len(span.tokens)) * span.mask.shape[-1]
        self._last = self._begin + seq_lens[span.tokens] - 1
        self._window = window

    def admit_next(self) -> None:
        """Each request reads one key more, and under a window the first one of the last step no longer."""
        self._last += 1
        self._flat[self._last] = 0
        if self._window is not None:
            behind = self._last - self._window
            self._flat[behind[behind >= self._begin]] = -np.inf


def _by_rest(spans: Sequence[Span], rests: Ints, block_size: int) -> list[list[tuple[int, Ints, Ints]]]:
    """For each rest of an age by the block size: (span, places in it, batch rows) of the requests that have it."""
    return [list(_with_rest(spans, rests, rest)) for rest in range(block_size)]


def _with_rest(spans: Sequence[Span], rests: Ints, rest: int) -> Iterator[tuple[int, Ints, Ints]]:
    for index, span in enumerate(spans):
        places = np.flatnonzero(rests[span.tokens] == rest)
        if len(places):
            yield index, places, span.tokens[places]
