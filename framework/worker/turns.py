"""Host memory that steps are told from, in turns: what a step in flight may still read is not written.

A step that reads it on the device itself counts the turns there; a copy to the device does not wait for the device when
it reads such memory. Called by the step's input buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.batch import NULL_BLOCK, NULL_ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import BlockDelta
    from framework.interfaces import Backend


@dataclass(slots=True)
class Turn:
    """One piece of int64 host memory: what a padded step of decodes is told.

    number  its place in the ring
    tensor  [2 + groups, width] all of it
    rows    [width] req_idx of the step's rows, NULL_ROW behind them
    blocks  [groups, width] the block that each of them enters, NULL_BLOCK for none; lines: one for each group
    count   [width] first how many rows there are
    told    the array of rows that stands there
    """

    number: int
    tensor: Tensor
    rows: NDArray[Any]
    blocks: NDArray[Any]
    lines: list[NDArray[Any]]
    count: NDArray[Any]
    told: NDArray[Any] | None = None

    def tell_rows(self, rows: NDArray[Any]) -> None:
        """Writes rows [R], unless they stand there: steps that go on share the array."""
        if self.told is rows:
            return
        self.rows[: len(rows)] = rows
        self.rows[len(rows) :] = NULL_ROW
        self.count[0] = len(rows)
        self.told = rows

    def tell_blocks(self, new_blocks: Sequence[NDArray[Any]]) -> None:
        """new_blocks: [groups][R]"""
        self.blocks.fill(NULL_BLOCK)
        for line, blocks in zip(self.lines, new_blocks, strict=True):
            line[: len(blocks)] = blocks

    def tell_entered(self, deltas: Sequence[BlockDelta]) -> None:
        """As `tell_blocks`, of deltas that say where their blocks go."""
        self.blocks.fill(NULL_BLOCK)
        for line, delta in zip(self.lines, deltas, strict=True):
            if delta.at is not None:
                line[delta.at] = delta.ids


class Turns:
    """A ring of pieces for max_in_flight steps and the one that is made meanwhile. ring: [pieces, 2 + groups, width]"""

    def __init__(self, backend: Backend, num_groups: int, width: int, max_in_flight: int) -> None:
        count, lines = max_in_flight + 1, 2 + num_groups
        self.ring = backend.host_memory(count * lines * width).view(count, lines, width)
        arrays = self.ring.numpy()
        self._turns = [Turn(i, self.ring[i], a[0], a[1:-1], [*a[1:-1]], a[-1]) for i, a in enumerate(arrays)]
        self._last = 0

    def next(self) -> Turn:
        """The piece that was used longest ago: its step has come back."""
        self._last = last = (self._last + 1) % len(self._turns)
        return self._turns[last]
