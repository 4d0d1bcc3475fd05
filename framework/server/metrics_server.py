"""The counts that one server keeps, where its routes and its middleware find them. Light: no library is imported."""

from __future__ import annotations

from dataclasses import dataclass, field

from framework.server.metrics_engine import EngineMetrics
from framework.server.metrics_http import HttpCounts


@dataclass(eq=False)
class ServerMetrics:
    """engine: None until the metrics hear the engine."""

    http: HttpCounts = field(default_factory=HttpCounts)
    engine: EngineMetrics | None = None
