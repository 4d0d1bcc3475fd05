"""`/metrics`: what the engine and the HTTP side counted, as text that Prometheus reads.

Puts the parts together and asks the engine; what is counted, and how it is called, stands in the modules beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from framework import __version__
from framework.server.metrics_engine import EngineMetrics
from framework.server.metrics_names import engine_families, http_families

if TYPE_CHECKING:
    from prometheus_client import Metric

    from framework.server.metrics_engine import Snapshot
    from framework.server.service import Service

ENGINE_TIMEOUT_S = 5.0
"""How long `/metrics` waits for the step that runs: less than Prometheus waits for an answer, 10 s."""


@dataclass(eq=False)
class _Collector:
    """The families of one moment."""

    families: Sequence[Metric]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


async def start(service: Service) -> None:
    """Lets the metrics hear the engine."""
    service.metrics.engine = EngineMetrics(service.options.slo)
    await service.llm.observe("metrics", service.metrics.engine)


def routes(service: Service) -> APIRouter:
    """`GET /metrics`; 503 when the engine does not answer in time."""
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return await _answer(service)

    return router


async def _answer(service: Service) -> Response:
    engine = service.metrics.engine
    assert engine is not None, "metrics are asked for before `start`"
    try:
        snapshot = await asyncio.wait_for(service.llm.ask(engine.read), ENGINE_TIMEOUT_S)
    except TimeoutError:
        return Response(f"the engine's step did not end in {ENGINE_TIMEOUT_S:g} s", 503, media_type="text/plain")
    encode, content_type = choose_encoder("")  # the one format in which a name with a colon is the same for everybody
    text = await asyncio.to_thread(lambda: encode(registry_of(service, snapshot)))
    return Response(text, media_type=content_type)


def registry_of(service: Service, snapshot: Snapshot) -> CollectorRegistry:
    """A registry of one moment, with the process's memory, time and open files."""
    metrics = service.metrics
    assert metrics.engine is not None
    families = [*engine_families(snapshot, metrics.engine.objectives, service.model_name, __version__)]
    families += http_families(metrics.http.read())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    ProcessCollector(registry=registry)
    return registry
