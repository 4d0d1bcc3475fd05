"""Blocks of preempted requests in host memory: which host block holds what, and the moves that the next step makes.

Holds no tensor: the runner moves bytes by `BlockOps`. Only whole committed blocks are swapped out, so that nothing a
step in flight still writes is ever copied; the few tokens behind them are computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from framework.batch import NULL_BLOCK
from framework.scheduler.kv_groups import num_held

if TYPE_CHECKING:
    from framework.batch import BlockOps
    from framework.request import Request

_NOTHING = -1
"""In a list of host blocks: the request had given the block up."""


class SwapSpace:
    """`num_blocks` host blocks. Without any, every preemption recomputes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # one list a KV group, in the order of the tokens; -1 where the request has given a block up
        self._host_blocks: dict[Request, list[list[int]]] = {}
        self._out: list[tuple[int, int]] = []
        self._in: list[tuple[int, int]] = []
        self._returning: list[int] = []  # read by the next step: written again by a later one at the earliest

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing any more once the next step is made."""
        return len(self._free) + len(self._returning)

    def swap_out(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        """Plans to keep the content of `blocks`, one list a KV group; False when there is no room for all of them. The
        null block among them stands for nothing."""
        if num_held(blocks) > len(self._free):
            return False
        held = [[_NOTHING if block == NULL_BLOCK else self._free.pop() for block in group] for group in blocks]
        for group, host in zip(blocks, held, strict=True):
            self._out += [pair for pair in zip(group, host, strict=True) if pair[1] != _NOTHING]
        self._host_blocks[request] = held
        return True

    def num_columns(self, request: Request) -> int:
        """Columns of its block lists that are kept for the request, from the first on; those that a window has given up
        are among them, and hold nothing."""
        return len(self._host_blocks[request][0]) if request in self._host_blocks else 0

    def swap_in(self, request: Request, blocks: Sequence[Sequence[int]], first: int) -> None:
        """Plans to bring back what is kept behind the request's first `first` blocks, and keeps nothing of it."""
        for group, host in zip(blocks, self._host_blocks.pop(request, []), strict=False):
            pairs = zip(host[first:], group[first : len(host)], strict=True)
            self._in += [pair for pair in pairs if pair[0] != _NOTHING]
            self._returning += _kept(host)

    def drop(self, request: Request) -> None:
        """Keeps nothing of the request any more."""
        for host in self._host_blocks.pop(request, []):
            self._returning += _kept(host)

    def lose(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Moves out that a step was told and did not make for sure: whoever relies on them is computed again."""
        lost = {host for _, host in pairs}
        for request in [r for r, held in self._host_blocks.items() if not lost.isdisjoint(chain(*held))]:
            self.drop(request)

    def emit(self, ops: BlockOps) -> None:
        """Hands the planned moves to a step."""
        ops.swap_out, ops.swap_in = self._out, self._in
        self._free += self._returning
        self._out, self._in, self._returning = [], [], []


def _kept(host: Iterable[int]) -> list[int]:
    return [block for block in host if block != _NOTHING]
