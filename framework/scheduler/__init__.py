"""The default scheduler and its parts: block pool, prefix cache, ledger of steps in flight. No tensors, no torch."""

from __future__ import annotations

from framework.scheduler.block_pool import BlockPool, BlockState
from framework.scheduler.prefix_cache import PrefixCache, extend_hashes
from framework.scheduler.scheduler import Scheduler

__all__ = ["BlockPool", "BlockState", "PrefixCache", "Scheduler", "extend_hashes"]
