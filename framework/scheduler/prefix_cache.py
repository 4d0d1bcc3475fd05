"""Which blocks of a request are already computed, and under which keys its own become findable.

Keys chain over whole blocks and hold everything that changes KV: parent, tokens, adapter, salt, images. The blocks
themselves and their lifetime belong to the block pool; the scheduler calls in at admission and after each step.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.request import Request
    from framework.scheduler.block_pool import BlockPool

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
    """Finds and publishes whole blocks, in every KV group alike; switched off it finds and publishes nothing."""

    def __init__(self, pool: BlockPool, block_size: int, num_groups: int, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._groups = range(num_groups)
        self._enabled = enabled

    def lookup(self, request: Request) -> list[list[int]]:
        """Published blocks of the longest known prefix, one list a KV group, all of one length.

        Leaves at least one known token to compute. Empty for a request that asks for prompt logprobs, which need every
        position computed. Takes no reference: acquire the blocks before the next allocation.
        """
        return self._find(request) if request.params.prompt_logprobs is None else [[] for _ in self._groups]

    def num_passed_over(self, request: Request) -> int:
        """Blocks of its known prefix that a request computes again, since it asks for prompt logprobs."""
        return 0 if request.params.prompt_logprobs is None else len(self._find(request)[0])

    def _find(self, request: Request) -> list[list[int]]:
        hits: list[list[int]] = [[] for _ in self._groups]
        if not self._enabled:
            return hits
        extend_hashes(request, (request.num_tokens - 1) // self._block_size, self._block_size)
        for digest in request.block_hashes[: (request.num_tokens - 1) // self._block_size]:
            column = [self._pool.find((digest, group)) for group in self._groups]
            if None in column:
                break
            for blocks, block in zip(hits, column, strict=True):
                blocks.append(block)  # type: ignore[arg-type]  # None was excluded above
        return hits

    def commit(self, request: Request, num_blocks: int) -> None:
        """Commits the request's blocks up to `num_blocks`, all computed by now, and publishes them."""
        first, request.num_published_blocks = request.num_published_blocks, num_blocks
        if self._enabled:
            extend_hashes(request, num_blocks, self._block_size)
        for group in self._groups:
            blocks = request.block_ids[group]
            for index in range(first, num_blocks):
                self._pool.commit(blocks[index])
                if self._enabled:
                    self._pool.publish(blocks[index], (request.block_hashes[index], group))
