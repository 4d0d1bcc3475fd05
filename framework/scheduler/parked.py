"""Blocks in the hands of a KV connector: filled for requests that wait for them, or read after their stay has ended.

The scheduler parks them here, by lease, and gets them back when the connector reports; the block pool counts them as
held meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.request import Request


@dataclass(slots=True)
class Loading:
    """A request whose blocks are being filled. failed: those of them of which the connector has said so."""

    request: Request
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Kept:
    """Blocks of a stay that has ended, until `num_reports` of its lease have come; None while the ledger has them."""

    blocks: list[int] | None
    num_reports: int


class Parked:
    """What waits for reports of the connector."""

    def __init__(self) -> None:
        self.loading: dict[int, Loading] = {}
        self._kept: dict[int, _Kept] = {}

    def __bool__(self) -> bool:
        """Whether stays that have ended are still kept: somebody has to make steps until they are not."""
        return bool(self._kept)

    @property
    def num_blocks(self) -> int:
        """Blocks that come back with reports. Those that the ledger still has are counted there."""
        loading = sum(len(group) for one in self.loading.values() for group in one.request.block_ids)
        return loading + sum(len(kept.blocks or ()) for kept in self._kept.values())

    def keep(self, lease: int, blocks: list[int] | None, num_reports: int) -> None:
        self._kept[lease] = _Kept(blocks, num_reports)

    def take_over(self, lease: int, blocks: list[int]) -> bool:
        """The ledger lets go of a stay's blocks; False when nobody else waits for them."""
        kept = self._kept.get(lease)
        if kept is not None:
            kept.blocks = blocks
        return kept is not None

    def report(self, lease: int) -> list[int]:
        """Blocks that are free now that the connector has reported `lease`; none when nobody waits for it."""
        kept = self._kept.get(lease)
        if kept is None:
            return []
        kept.num_reports -= 1
        if kept.num_reports:
            return []
        del self._kept[lease]
        return kept.blocks or []

    def fail(self, blocks: Collection[int]) -> None:
        """Notes blocks whose load failed, for the requests that are waiting for them."""
        for one in self.loading.values():
            one.failed.update(block for group in one.request.block_ids for block in group if block in blocks)
