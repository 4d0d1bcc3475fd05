"""Which blocks of a request are already computed, and under which keys its own become findable.

Keys chain over whole blocks and hold everything that changes KV: parent, tokens, adapter, salt, images. The blocks
themselves and their lifetime belong to the block pool; the scheduler calls in at admission and after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING

from framework.batch import NULL_BLOCK

if TYPE_CHECKING:
    from framework.request import Request
    from framework.scheduler.block_pool import BlockPool
    from framework.scheduler.kv_groups import KVGroups

DIGEST_BYTES = 16


def extend_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Appends to `request.block_hashes` until it holds the keys of the first `num_blocks` whole blocks.

    Key of a block: 128-bit BLAKE2b over the parent's key, the tokens as little-endian int32, and the images that
    overlap the block. The parent of the first block is a digest of adapter and salt. `request.mm_features`, if any, is
    a sequence of (identity, offset, length): which image, and where its placeholder tokens lie.
    """
    hashes = request.block_hashes
    first = len(hashes)
    if first >= num_blocks:
        return
    parent = hashes[-1] if hashes else _root(request)
    token_ids = request.token_ids[first * block_size : num_blocks * block_size]
    assert len(token_ids) == (num_blocks - first) * block_size, "a block is hashed before all its tokens are known"
    tokens = pack(f"<{len(token_ids)}i", *token_ids)
    for index in range(first, num_blocks):
        at = (index - first) * block_size * 4
        digest = blake2b(parent + tokens[at : at + block_size * 4], digest_size=DIGEST_BYTES)
        if request.mm_features is not None:
            digest.update(_images(request, index * block_size, (index + 1) * block_size))
        parent = digest.digest()
        hashes.append(parent)


def _root(request: Request) -> bytes:
    # repr keeps (None, "X"), ("X", None) and ("None", "X") apart
    return blake2b(repr((request.lora, request.cache_salt)).encode(), digest_size=DIGEST_BYTES).digest()


def _images(request: Request, start: int, end: int) -> bytes:
    """Identity and place of the images that overlap tokens [start, end)."""
    inside = [(str(name), at, size) for name, at, size in request.mm_features if at < end and at + size > start]
    return repr(inside).encode() if inside else b""


class PrefixCache:
    """Finds and publishes whole blocks, each under its key and KV group; switched off it finds and publishes nothing.

    A group with a window needs no more of a prefix than the window reaches, so that a hit is the longest one that every
    group can go on from.
    """

    def __init__(self, pool: BlockPool, groups: KVGroups, enabled: bool) -> None:
        self._pool, self._groups, self._enabled = pool, groups, enabled
        self._block_size = groups.block_size

    def lookup(self, request: Request) -> list[list[int]]:
        """Published blocks of the longest known prefix, one list a KV group, all of one length; the null block before
        those that a window reaches.

        Leaves at least one known token to compute. Empty for a request that asks for prompt logprobs, which need every
        position computed. Takes no reference: acquire the blocks before the next allocation.
        """
        return self._find(request) if request.params.prompt_logprobs is None else [[] for _ in range(self._groups.num)]

    def num_passed_over(self, request: Request) -> int:
        """Blocks of its known prefix that a request computes again, since it asks for prompt logprobs."""
        return 0 if request.params.prompt_logprobs is None else len(self._find(request)[0])

    def _find(self, request: Request) -> list[list[int]]:
        hits: list[list[int]] = [[] for _ in range(self._groups.num)]
        if not self._enabled:
            return hits
        most = (request.num_tokens - 1) // self._block_size
        extend_hashes(request, most, self._block_size)
        digests, find = request.block_hashes[:most], self._pool.find
        for digest in digests if self._groups.full else ():
            column = [find((digest, group)) for group in self._groups.full]
            if None in column:
                break
            for group, block in zip(self._groups.full, column, strict=True):
                hits[group].append(block)  # type: ignore[arg-type]  # None was excluded above
        return self._with_windows(hits, digests) if self._groups.sliding else hits

    def _with_windows(self, hits: list[list[int]], digests: Sequence[bytes]) -> list[list[int]]:
        """Cuts the hits of full groups to the longest length that the groups with a window can go on from as well.

        A shorter one may be too short for a group that has been asked, so they are asked until none objects.
        """
        length, before = len(hits[self._groups.full[0]]) if self._groups.full else len(digests), -1
        while length != before:
            before = length
            for group in self._groups.sliding:
                length = self._longest(digests[:length], group)
        for group in self._groups.full:
            del hits[group][length:]
        for group in self._groups.sliding:
            first = max(0, length - self._groups.run_length(group))
            run = [self._pool.find((digest, group)) for digest in digests[first:length]]
            hits[group] = [NULL_BLOCK] * first + [block for block in run if block is not None]
        return hits

    def _longest(self, digests: Sequence[bytes], group: int) -> int:
        """The longest prefix of these whose last blocks, as many as the window reaches, are published. Where the prefix
        is shorter than that, all of it."""
        needed, end = self._groups.run_length(group), len(digests)
        for column in range(len(digests) - 1, -1, -1):
            if end - column > needed:
                return end
            if self._pool.find((digests[column], group)) is None:
                end = column
        return end

    def commit(self, request: Request, num_blocks: int) -> None:
        """Commits the request's blocks up to `num_blocks`, all computed by now, and publishes them."""
        first, request.num_published_blocks = request.num_published_blocks, num_blocks
        if self._enabled:
            extend_hashes(request, num_blocks, self._block_size)
        pool, enabled, hashes = self._pool, self._enabled, request.block_hashes
        for group, blocks in enumerate(request.block_ids):
            for index in range(first, num_blocks):
                block = blocks[index]
                if block != NULL_BLOCK:  # behind a window, and never needed
                    pool.commit(block)
                    if enabled:
                        pool.publish(block, (hashes[index], group))
