"""Decodes that go on: the spans of a step follow from those of the step before instead of being made anew.

Between two steps of the same requests every context is one key longer, and now and then a request enters its next
block. Right after a forward pass nothing of the host's code is in the caches, so what a step does not do counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from framework.batch import InputBatch
from framework_attention.spans import Ints, Span


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks that requests of one span enter: `blocks[i]` stands at `columns[i]` of the span's request `places[i]`."""

    span: int
    places: Ints
    columns: Ints
    blocks: Ints


class SteadyDecodes:
    """The course of a step in which every request decodes one token, for as long as the same requests go on.

    Knows the spans' masks, which it moves on in place. Spans with a window, whose first key moves as well, are not
    followed. age: steps by which the course has moved on.
    """

    def __init__(self, spans: Sequence[Span], seq_lens: Ints, block_size: int) -> None:
        self._block_size = block_size
        self.age = 0
        self._room = min([span.blocks.shape[1] * block_size - span.num_keys for span in spans], default=0)
        self._masks = [_Mask(span, seq_lens) for span in spans]
        # A request enters a block at the ages that leave this rest: its new key is the first of a block then.
        rests = (1 - seq_lens) % block_size
        self._entering = [list(_entering(spans, rests, rest)) for rest in range(block_size)]

    def advance(self, batch: InputBatch, group: int) -> list[NewBlocks] | None:
        """Moves the masks on by one key; the blocks that were entered, or None when a span has no room for it.

        batch: the next step; of what it holds in tensors nothing is read while no block is entered.
        """
        if self.age >= self._room:
            return None
        self.age += 1
        for mask in self._masks:
            mask.admit_next()
        entering = self._entering[self.age % self._block_size]
        return [self._enter(batch, group, *one) for one in entering] if entering else []

    def _enter(self, batch: InputBatch, group: int, span: int, places: Ints, batch_rows: Ints) -> NewBlocks:
        columns = (batch.seq_lens.numpy()[batch_rows] - 1) // self._block_size
        blocks = batch.block_table[group].numpy()[batch.rows_np[batch_rows], columns]
        return NewBlocks(span, places, columns, blocks.astype(np.int64))


class _Mask:
    """The mask of one span, and where in it the last key of each request stands."""

    __slots__ = ("_flat", "_last")

    def __init__(self, span: Span, seq_lens: Ints) -> None:
        self._flat = span.mask.numpy().reshape(-1)  # the same memory
        self._last = np.arange(len(span.tokens)) * span.mask.shape[-1] + seq_lens[span.tokens] - 1

    def admit_next(self) -> None:
        """Each request reads one key more."""
        self._last += 1
        self._flat[self._last] = 0


def _entering(spans: Sequence[Span], rests: Ints, rest: int) -> Iterator[tuple[int, Ints, Ints]]:
    """(span, places in it, batch rows) of the requests that enter a block at ages of this rest."""
    for index, span in enumerate(spans):
        places = np.flatnonzero(rests[span.tokens] == rest)
        if len(places):
            yield index, places, span.tokens[places]
