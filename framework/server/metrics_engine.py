"""What an engine and its requests are measured by: an observer that hears requests, and reads all else when asked.

A step costs nothing here: the engine counts by itself, and `read` takes its counters, and the times of requests that
run, when somebody wants to see them. What the numbers are called is said in `metrics_names`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework.server.metrics_buckets import Buckets
from framework.server.metrics_slo import SERVED, Objectives

if TYPE_CHECKING:
    from framework.engine.engine import Engine
    from framework.request import Request, RequestMetrics, RequestOutput

_FIRST_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_TOKEN_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5,
    5, 10,
)  # fmt: skip
_REQUEST_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BOUNDS = {
    "ttft": _FIRST_S, "queue": _FIRST_S, "prefill": _FIRST_S, "itl": _TOKEN_S, "tpot": _TOKEN_S, "e2e": _REQUEST_S,
    "decode": _REQUEST_S, "prompt_tokens": _TOKENS, "generation_tokens": _TOKENS,
}  # fmt: skip
OUTCOMES = ("good", "late", "error", "abort")
REASONS = ("stop", "length", "abort", "error")
_TAKEN_BACK = ("prefix_query_tokens", "prefix_hit_tokens", "connector_hit_tokens")
"""Counters that the scheduler lowers again when a load fails, which to Prometheus is a server that began anew."""


@dataclass(slots=True)
class Snapshot:
    """One moment of an engine, out of reach of later steps.

    facts             what it was built with
    counts            the scheduler's
    totals            sums over all steps: prompt and output tokens, seconds of steps by kind
    part_s            seconds by part of a step
    step_tokens       tokens of a step
    num_steps         steps so far
    num_prompt_tokens, num_cached_tokens  of prompts whose first token came, those from the prefix cache among them
    reasons           completions that ended, by finish reason
    outcomes          requests that ended, by what `Objectives.outcome` says
    histograms        {name: values of requests}
    """

    facts: Mapping[str, Any]
    counts: Mapping[str, int | float]
    totals: Mapping[str, float]
    part_s: Mapping[str, float]
    step_tokens: Buckets
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    reasons: Mapping[str, int]
    outcomes: Mapping[str, int]
    histograms: Mapping[str, Buckets]


@dataclass(slots=True)
class _Told:
    """How much of a request's times is counted already."""

    has_first: bool = False
    num_gaps: int = 0


@dataclass(slots=True)
class EngineMetrics:
    """Observer of one engine. Times of a request count once they are known: those of one that runs with the next
    `read`, the others at its end."""

    objectives: Objectives = field(default_factory=Objectives)
    _histograms: dict[str, Buckets] = field(default_factory=lambda: {n: Buckets(b) for n, b in _BOUNDS.items()})
    _reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    _outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    _num_prompt_tokens: int = 0
    _num_cached_tokens: int = 0
    _told: dict[str, _Told] = field(default_factory=dict)
    _most: dict[str, int | float] = field(default_factory=lambda: dict.fromkeys(_TAKEN_BACK, 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_request_finished(self, request: Request, output: RequestOutput) -> None:
        with self._lock:
            self._tell(request, output.metrics)
            del self._told[request.request_id]
            self._end(output)

    def read(self, engine: Engine) -> Snapshot:
        """The engine as it is between two steps; on its thread."""
        with self._lock:
            running = engine.times()
            for request, metrics in running:
                self._tell(request, metrics)
            ids = {request.request_id for request, _ in running}
            self._told = {i: told for i, told in self._told.items() if i in ids}  # some are lost with a failed step
            return self._snapshot(engine)

    def _tell(self, request: Request, metrics: RequestMetrics) -> None:
        """Counts what is new of a request's times."""
        told = self._told.setdefault(request.request_id, _Told())
        if metrics.ttft is not None and not told.has_first:
            told.has_first = True
            self._tell_first(request, metrics.ttft, metrics.queue_time)
        gaps = metrics.itl[told.num_gaps :]  # a copy: another thread may append to it
        told.num_gaps += len(gaps)
        self._histograms["itl"].add_all(gaps)

    def _tell_first(self, request: Request, ttft: float, queue_time: float | None) -> None:
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_cached_tokens += max(request.num_cached_tokens, 0)
        self._histograms["ttft"].add(ttft)
        if queue_time is not None:
            self._histograms["queue"].add(queue_time)
            self._histograms["prefill"].add(ttft - queue_time)

    def _end(self, output: RequestOutput) -> None:
        reasons = [completion.finish_reason or "error" for completion in output.outputs]
        for reason in reasons:
            self._reasons[reason] += 1
        self._outcomes[self.objectives.outcome(reasons, output.metrics)] += 1
        if SERVED.issuperset(reasons):
            self._serve(output)

    def _serve(self, output: RequestOutput) -> None:
        """Counts the whole of a request that ended as it was meant to."""
        metrics, histograms = output.metrics, self._histograms
        assert metrics.e2e is not None and metrics.ttft is not None, f"{metrics} of a request that has ended"
        histograms["e2e"].add(metrics.e2e)
        histograms["decode"].add(metrics.e2e - metrics.ttft)
        if metrics.tpot is not None:
            histograms["tpot"].add(metrics.tpot)
        histograms["prompt_tokens"].add(len(output.prompt_token_ids))
        histograms["generation_tokens"].add(sum(len(completion.token_ids) for completion in output.outputs))

    def _risen(self, counts: Mapping[str, int | float]) -> dict[str, int | float]:
        """The counts, of which none has fallen since the last call."""
        self._most = {key: max(most, counts[key]) for key, most in self._most.items()}
        return {**counts, **self._most}

    def _snapshot(self, engine: Engine) -> Snapshot:
        stats = engine.core.last_step
        step_tokens = Buckets(_STEP_TOKENS)
        for num_tokens, num_steps in stats.steps_by_tokens.items():
            step_tokens.add(num_tokens, num_steps)
        return Snapshot(
            facts=engine.facts,
            counts=self._risen(engine.core.stats()),
            totals={
                "prefill_tokens": stats.total_prefill_tokens,
                "decode_tokens": stats.total_decode_tokens,
                "prefill_s": stats.prefill_s,
                "decode_s": stats.decode_s,
            },
            part_s=dict(stats.total_seconds),
            step_tokens=step_tokens,
            num_steps=stats.num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            reasons=dict(self._reasons),
            outcomes=dict(self._outcomes),
            histograms={name: buckets.copy() for name, buckets in self._histograms.items()},
        )
