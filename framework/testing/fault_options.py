"""Options of the fault-injecting KV connector, in a module that imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from framework.errors import ConfigError


@dataclass(frozen=True)
class FaultOptions:
    """Of `kv_connector=faulty`: which connector it stands around, and how often it does what to it.

    inner, inner_options  the connector and its own options
    seed                  of the faults: a run can be repeated
    late_saves            steps that pass between the end of a stay in the pool and the moment its blocks are stored
    failed_loads          share of the loads of which a block is reported as failed and holds NaN
    dropped_loads         share of the loads that never reach the inner connector
    dropped_saves         share of the stays of which nothing is stored
    reorder               True: reports come out of order, some of them steps later
    """

    inner: str = "memory"
    inner_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    late_saves: int = 0
    failed_loads: float = 0.0
    dropped_loads: float = 0.0
    dropped_saves: float = 0.0
    reorder: bool = False

    def __post_init__(self) -> None:
        for name in ("failed_loads", "dropped_loads", "dropped_saves"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"kv_connector.{name}={getattr(self, name)} is outside of [0, 1]. Choose one inside")
        if self.late_saves < 0:
            raise ConfigError(f"kv_connector.late_saves={self.late_saves} is negative. Use 0 or more")
        if self.inner in ("none", "faulty"):
            raise ConfigError(f"kv_connector.inner={self.inner} has nothing to fail. Name another connector")
