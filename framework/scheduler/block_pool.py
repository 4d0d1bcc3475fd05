"""Physical KV blocks: who holds them, what is known of their content, and which one is handed out next.

Knows neither requests nor tokens: keys of published blocks are opaque. The scheduler allocates, frees and commits;
the prefix cache finds and publishes.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from framework.batch import NULL_BLOCK


class BlockState(enum.IntEnum):
    """What is known of a block's content.

    FREE -> ALLOCATED -> IN_FLIGHT -> COMMITTED -> PUBLISHED

    FREE       nobody's, nothing worth keeping in it
    ALLOCATED  somebody's, no step was told to write it yet
    IN_FLIGHT  a step was told to write it, and not every slot of it is committed yet
    COMMITTED  every slot was written by a step that has come back
    PUBLISHED  committed, and found by its key; with reference count 0 it waits, still findable, to be reused
    """

    FREE = 0
    ALLOCATED = 1
    IN_FLIGHT = 2
    COMMITTED = 3
    PUBLISHED = 4


_FREE, _ALLOCATED, _IN_FLIGHT, _COMMITTED, _PUBLISHED = (int(s) for s in BlockState)


class BlockPool:
    """`num_blocks` blocks, of which null block 0 is never handed out.

    Blocks without findable content go first, the lowest id first, so that one allocation tends to be physically
    consecutive; then published ones that nobody holds, the least recently freed first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._states = [_FREE] * num_blocks
        # A byte a block, 1 for one without findable content: where the lowest is costs a search through a few bytes. A
        # heap of as many numbers would be read at twenty places a block, none of which a step finds in a cache.
        self._is_blank = bytearray([0] + [1] * (num_blocks - 1))
        self._num_blank, self._lowest = num_blocks - 1, NULL_BLOCK + 1  # no blank block lies below the lowest
        self._reusable: OrderedDict[int, None] = OrderedDict()  # published, reference count 0, oldest first
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Blocks that an allocation may take, published ones that nobody holds included."""
        return self._num_blank + len(self._reusable)

    @property
    def num_reusable(self) -> int:
        """The free blocks among them that are published: what stands in them may still be found."""
        return len(self._reusable)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def state(self, block: int) -> BlockState:
        return BlockState(self._states[block])

    def published(self) -> dict[Hashable, int]:
        """{key: block}, a copy."""
        return dict(self._block_of)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: acquiring those takes them from the free ones. The null block is none."""
        return sum(not self._ref_counts[b] for b in blocks if b != NULL_BLOCK)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with reference count 1, in rising order. Published ones among them lose their key."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free of {self.num_blocks}"
        blocks = self._take_blank(min(count, self._num_blank))
        if len(blocks) < count:
            blocks = sorted(blocks + self._take_reusable(count - len(blocks)))
        for block in blocks:
            self._ref_counts[block] = 1
            self._states[block] = _ALLOCATED
        return blocks

    def _take_blank(self, count: int) -> list[int]:
        blocks, block, is_blank = [], self._lowest, self._is_blank
        for _ in range(count):
            block = is_blank.index(1, block)
            is_blank[block] = 0
            blocks.append(block)
        self._num_blank, self._lowest = self._num_blank - count, block
        return blocks

    def _take_reusable(self, count: int) -> list[int]:
        blocks = [self._reusable.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            del self._block_of[self._key_of.pop(block)]
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more holder for whole blocks: published ones, as `find` returned them, or committed ones of a request.
        The null block among them stays nobody's."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self._states[block] >= _COMMITTED, f"block {block} shared in state {self.state(block).name}"
            if not self._ref_counts[block]:
                del self._reusable[block]
            self._ref_counts[block] += 1

    def hold(self, block: int) -> None:
        """One more holder for a block of a request, who reads it and writes nothing into it."""
        assert self._ref_counts[block] > 0, f"block {block} is nobody's, and is to be read"
        self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for a request's blocks, given in the order of its tokens.

        They become free from the tail, so that a prefix, which more requests can use, lives longest.
        """
        for block in reversed(blocks):
            left = self._ref_counts[block] - 1
            assert left >= 0, f"block {block} freed with reference count 0"
            self._ref_counts[block] = left
            if left:
                continue
            if self._states[block] == _PUBLISHED:
                self._reusable[block] = None
            else:
                self._states[block] = _FREE
                self._is_blank[block] = 1
                self._num_blank += 1
                if block < self._lowest:
                    self._lowest = block

    def write(self, blocks: Iterable[int]) -> None:
        """Notes that the step being scheduled writes into `blocks`."""
        for block in blocks:
            assert self._states[block] in (_ALLOCATED, _IN_FLIGHT), (
                f"block {block} written in state {self.state(block).name}"
            )
            self._states[block] = _IN_FLIGHT

    def commit(self, block: int) -> None:
        """Notes that every slot of `block` has been written by steps that came back."""
        assert self._states[block] == _IN_FLIGHT, f"block {block} committed in state {self.state(block).name}"
        self._states[block] = _COMMITTED

    def publish(self, block: int, key: Hashable) -> bool:
        """Makes a committed block findable; False when another block already stands under `key` and stays there."""
        assert self._states[block] == _COMMITTED, f"block {block} published in state {self.state(block).name}"
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._states[block] = _PUBLISHED
        return True

    def find(self, key: Hashable) -> int | None:
        """The published block of `key`, held or not; it must be acquired before the next allocation."""
        return self._block_of.get(key)
