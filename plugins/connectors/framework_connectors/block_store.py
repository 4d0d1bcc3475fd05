"""KV blocks in host memory under keys, the least recently used of them dropped first, and the stores of this process.

Knows neither requests nor engines: a key is whatever the connector says, and a block a tensor a layer. Safe to use from
several threads; what it hands out is never written again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from framework.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class BlockStore:
    """At most `capacity_bytes` of blocks."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[Hashable, Sequence[Tensor]] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def put(self, key: Hashable, block: Sequence[Tensor]) -> bool:
        """Keeps a block; the caller leaves its tensors alone from then on. False when it is larger than the store.

        What stands under the key already stays: it is the same KV.
        """
        size = _num_bytes(block)
        if size > self.capacity_bytes:
            return False
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = block
                self.num_bytes += size
            self._blocks.move_to_end(key)
            while self.num_bytes > self.capacity_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest)
        return True

    def get(self, key: Hashable) -> Sequence[Tensor] | None:
        """The block under `key`, None when it was never stored or had to go."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def touch(self, keys: Iterable[Hashable]) -> None:
        """Makes blocks the most recently used ones: they are about to be asked for."""
        with self._lock:
            for key in keys:
                if key in self._blocks:
                    self._blocks.move_to_end(key)


_stores: dict[str, BlockStore] = {}
_stores_lock = threading.Lock()


def store_named(name: str, capacity_bytes: int) -> BlockStore:
    """The store of this process under `name`, made at the first call; it outlives the engines that use it.

    ConfigError when it is there with another capacity: neither engine could rely on its own number.
    """
    with _stores_lock:
        store = _stores.setdefault(name, BlockStore(capacity_bytes))
    if store.capacity_bytes != capacity_bytes:
        raise ConfigError(
            f"kv_connector.capacity_bytes={capacity_bytes}: the store '{name}' of this process holds "
            f"{store.capacity_bytes}. Use that number, or name another store with kv_connector.store"
        )
    return store


def drop_store(name: str) -> None:
    """Forgets a store: engines that use it keep it, later ones get a new one."""
    with _stores_lock:
        _stores.pop(name, None)


def _num_bytes(block: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in block)
