"""Options of the connectors, in a module that imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from framework.errors import ConfigError


@dataclass(frozen=True)
class MemoryOptions:
    """Of `kv_connector=memory`.

    store           name of the block store; engines of one process that name the same one share it
    capacity_bytes  most that the store holds; the blocks that were used least recently go first
    async_loads     True: a request waits, without a row, while its blocks are loaded beside the steps of others
    """

    store: str = "default"
    capacity_bytes: int = 1 << 30
    async_loads: bool = False

    def __post_init__(self) -> None:
        if not self.store:
            raise ConfigError("kv_connector.store must not be empty. Name the store, or leave it out")
        if self.capacity_bytes < 1:
            raise ConfigError(
                f"kv_connector.capacity_bytes={self.capacity_bytes} is too small. Use 1 or more, or kv_connector=none"
            )
