"""Which blocks a request needs in each KV group: those of all its tokens, or those that a window still reaches.

A list of a group with a window holds the null block where a block has been given up, or was never needed, and grows
with the steps instead of at admission. Pure arithmetic over the lists; the scheduler and the prefix cache ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from framework.batch import NULL_BLOCK

if TYPE_CHECKING:
    from framework.interfaces import KVGroup

BlockLists = Sequence[list[int]]
"""Blocks of a request, one list a KV group."""


class KVGroups:
    """The groups of one scheduler, all of one block size.

    sliding   numbers of those with a window, whose lists are of one length
    shortest  number of a group whose list is never longer than another one's
    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.num, self.block_size = len(groups), groups[0].block_size
        self._windows = [group.window for group in groups]
        self.sliding = [number for number, window in enumerate(self._windows) if window is not None]
        self.full = [number for number, window in enumerate(self._windows) if window is None]
        self.shortest = self.sliding[0] if self.sliding else 0

    def first_needed(self, group: int, num_tokens: int) -> int:
        """The first column that is read by the token behind `num_tokens` computed ones, or by a later one.

        A query reads the window's positions up to its own, so that the last window - 1 computed tokens are needed.
        Source: vLLM's managers, one a kind of attention (`single_type_kv_cache_manager.py`).
        """
        window = self._windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def run_length(self, group: int) -> int:
        """Blocks that a window reaches back from a block border."""
        window = self._windows[group]
        assert window is not None, f"KV group {group} has no window"
        return -(-(window - 1) // self.block_size)

    def new_columns(self, num_hits: int, num_known: int, num_computed: int, end: int) -> list[range]:
        """Columns of each group that a request takes blocks for at admission, behind num_hits that it has.

        num_known, num_computed  its tokens, and those whose KV is there; end: tokens behind its first span
        """
        known, now = self._num_blocks(num_known), self._num_blocks(end)
        return [
            range(num_hits, known) if window is None else range(max(num_hits, self.first_needed(g, num_computed)), now)
            for g, window in enumerate(self._windows)
        ]

    def trim(self, blocks: list[list[int]], num_computed: int) -> None:
        """Takes out what a request with num_computed tokens does not need, in lists that nobody holds yet."""
        for group in self.sliding:
            first = min(self.first_needed(group, num_computed), len(blocks[group]))
            blocks[group][:first] = [NULL_BLOCK] * first

    def give_up(self, blocks: BlockLists, num_tokens: int) -> list[int]:
        """Takes the blocks that are not needed behind num_tokens computed tokens out of a request's lists."""
        given_up: list[int] = []
        for group in self.sliding:
            held = blocks[group]
            column = self.first_needed(group, num_tokens) - 1
            while column >= 0 and held[column] != NULL_BLOCK:  # before it, all are given up already
                given_up.append(held[column])
                held[column] = NULL_BLOCK
                column -= 1
        return given_up[::-1]

    def has_passed(self, blocks: BlockLists, num_tokens: int) -> bool:
        """Whether something is given up that the token behind the first num_tokens would read."""
        for group in self.sliding:
            column = self.first_needed(group, num_tokens)
            if column < len(blocks[group]) and blocks[group][column] == NULL_BLOCK:
                return True
        return False

    def behind(self, blocks: BlockLists, num_computed: int) -> list[int]:
        """What `give_up` takes out of a request's lists once num_computed tokens are committed."""
        whole = num_computed // self.block_size * self.block_size
        return [b for g in self.sliding for b in blocks[g][: self.first_needed(g, whole)] if b != NULL_BLOCK]

    def most_columns(self, group: int, tokens: range, span: int) -> int:
        """Blocks of a group with a window that a request holds at a time while its `tokens` are computed, of which a
        step computes `span` at most."""
        before = self.first_needed(group, tokens.start // self.block_size * self.block_size)
        return min(self._num_blocks(tokens.stop) - before, self.run_length(group) + self._num_blocks(span - 1) + 1)

    def most_blocks(self, num_tokens: int, span: int) -> int:
        """Blocks of all groups that a request of num_tokens tokens holds at a time."""
        of_full = len(self.full) * self._num_blocks(num_tokens)
        return of_full + sum(self.most_columns(group, range(num_tokens), span) for group in self.sliding)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def num_held(blocks: Sequence[Sequence[int]]) -> int:
    """Blocks of a request, one list a KV group, without those that it has given up."""
    return sum(len(group) - group.count(NULL_BLOCK) for group in blocks)


def in_token_order(blocks: Sequence[Sequence[int]]) -> list[int]:
    """Blocks of all groups, those of the same tokens side by side."""
    if len(blocks) == 1:
        return [block for block in blocks[0] if block != NULL_BLOCK]
    columns = zip_longest(*blocks, fillvalue=NULL_BLOCK)
    return [block for column in columns for block in column if block != NULL_BLOCK]
