"""What the moments of a point come to: latencies, throughput, goodput, errors by kind, and what it cost. Pure.

TTFT, TPOT, ITL and E2E count from the moment at which a request was sent; what the generator sent late is a figure of
its own, and a point of which it was too late is marked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from framework.runs.bench.serve.client import Outcome
    from framework.runs.bench.serve.drive import Point

METRICS = ("TTFT", "TPOT", "ITL", "E2E")
STATISTICS = ("mean", "p50", "p90", "p99")
UNITS = {
    "requests": "1/s", "goodput": "1/s", "output tokens": "1/s", "all tokens": "1/s",
    **{f"{metric}, {statistic}": "ms" for metric in METRICS for statistic in STATISTICS},
    "tokens of a chunk, mean": "", "cached share of the prompts": "", "errors": "", "cut off": "",
    "client CPU": "s", "server CPU": "s", "server CPU for an output token": "ms", "sent late, p99": "ms",
    "woken late, p99": "ms", "whole point": "s",
}  # fmt: skip
"""Figures of a point with their units, in the order in which they are shown."""


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one request. gaps: between chunks, each with one token or more.

    tpot  None below two tokens, and where no more than one moment of an answer without text was to be seen
    """

    ttft: float
    e2e: float
    tpot: float | None
    gaps: tuple[float, ...]
    tokens: int

    def meets(self, slo: Mapping[str, float]) -> bool:
        """A request of one token has no time between tokens to miss; one whose time is not known misses it."""
        unknown = 0.0 if self.tokens < 2 else math.inf
        values = {"ttft_ms": self.ttft, "tpot_ms": unknown if self.tpot is None else self.tpot, "e2e_ms": self.e2e}
        return all(values[name] <= limit for name, limit in slo.items())


@dataclass(frozen=True)
class Measured:
    """A point as it is reported. load: {"rate": 4.0}, {"concurrency": 8} or {}; late: why its figures are doubtful."""

    load: Mapping[str, float]
    figures: Mapping[str, float]
    errors: Mapping[str, int]
    messages: Mapping[str, str]
    counted_by: str
    late: str | None
    samples: Mapping[str, Sequence[float]] = field(repr=False)

    @property
    def label(self) -> str:
        return label_of(self.load)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def label_of(load: Mapping[str, float]) -> str:
    """What a load is called: `rate 4`."""
    return ", ".join(f"{name} {value:g}" for name, value in load.items()) or "all at once"


def latency_of(outcome: Outcome) -> Latency | None:
    """None for a request that failed, and for an answer without a chunk."""
    first = outcome.chunks[0][0] if outcome.chunks else outcome.first_bare
    if outcome.error is not None or first is None:
        return None
    assert outcome.ended is not None, "an answer with a chunk has a last one"
    moments, tokens = [moment for moment, _ in outcome.chunks], tokens_of(outcome)
    last = moments[-1] if moments else outcome.ended
    is_seen = bool(moments) or last > first
    tpot = 1e3 * (last - first) / (tokens - 1) if tokens > 1 and is_seen else None
    gaps = tuple(1e3 * (after - before) for before, after in pairwise(moments))
    return Latency(1e3 * (first - outcome.sent), 1e3 * (outcome.ended - outcome.sent), tpot, gaps, tokens)


def tokens_of(outcome: Outcome) -> int:
    """Output tokens as the server counted them, else chunks."""
    return outcome.output_tokens if outcome.output_tokens is not None else len(outcome.chunks)


def chunk_sizes(outcome: Outcome) -> list[float]:
    """Tokens of each chunk where every chunk counts them, else what a chunk of the answer has on the average."""
    counts = [count for _, count in outcome.chunks]
    if counts and all(count is not None for count in counts):
        return np.diff(np.array([0, *counts], dtype=float)).tolist()
    return [tokens_of(outcome) / len(counts)] * len(counts) if counts else []


def measure(
    point: Point,
    load: Mapping[str, float],
    slo: Mapping[str, float],
    costs: Mapping[str, float],
    max_late_ms: float,
) -> Measured:
    """costs: figures that are known beside the moments, such as CPU seconds."""
    seconds = point.end - point.start
    failed = [one for one in point.outcomes if one.error is not None]
    whole = [(one, latency) for one in point.outcomes if (latency := latency_of(one)) is not None]
    empty = len(point.outcomes) - len(failed) - len(whole)
    samples = {
        "TTFT": [one.ttft for _, one in whole],
        "TPOT": [one.tpot for _, one in whole if one.tpot is not None],
        "ITL": [gap for _, one in whole for gap in one.gaps],
        "E2E": [one.e2e for _, one in whole],
    }
    late = {
        "sent late, p99": _p99([1e3 * (one.sent - one.due) for one in point.outcomes]),
        "woken late, p99": _p99([1e3 * lag for lag in point.loop_lags]),
    }
    figures = {
        **_throughput(whole, seconds),
        **({"goodput": sum(one.meets(slo) for _, one in whole) / seconds} if slo else {}),
        **_statistics(samples),
        **_chunks([one for one, _ in whole]),
        "errors": float(len(failed) + empty),
        "cut off": float(point.num_cut),
        **costs,
        **late,
        "whole point": seconds,
    }
    if "server CPU" in figures and (tokens := sum(one.tokens for _, one in whole)):
        figures["server CPU for an output token"] = 1e3 * figures["server CPU"] / tokens
    errors = Counter(str(one.error) for one in failed) + Counter({"empty answer": empty})
    return Measured(
        load=dict(load),
        figures={name: figures[name] for name in UNITS if name in figures},
        errors=dict(errors),
        messages={str(one.error): one.message for one in reversed(failed)},
        counted_by="usage" if all(one.output_tokens is not None for one, _ in whole) else "chunks",
        late=_lateness(late, max_late_ms),
        samples=samples,
    )


def _throughput(whole: Sequence[tuple[Outcome, Latency]], seconds: float) -> dict[str, float]:
    outputs = sum(one.tokens for _, one in whole)
    counted = [one.prompt_tokens for one, _ in whole if one.prompt_tokens is not None]
    figures = {"requests": len(whole) / seconds, "output tokens": outputs / seconds}
    if whole and len(counted) == len(whole):  # only the server knows how many tokens a text has
        figures["all tokens"] = (sum(counted) + outputs) / seconds
        cached = [one.cached_tokens for one, _ in whole if one.cached_tokens is not None]
        if cached and sum(counted):
            figures["cached share of the prompts"] = sum(cached) / sum(counted)
    return figures


def _statistics(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    found = {}
    for metric, values in samples.items():
        if values:
            p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
            numbers = (float(np.mean(values)), p50, p90, p99)
            found.update({f"{metric}, {name}": one for name, one in zip(STATISTICS, numbers, strict=True)})
    return found


def _chunks(outcomes: Sequence[Outcome]) -> dict[str, float]:
    sizes = [size for one in outcomes for size in chunk_sizes(one)]
    return {"tokens of a chunk, mean": float(np.mean(sizes))} if sizes else {}


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0


def _lateness(late: Mapping[str, float], max_late_ms: float) -> str | None:
    said = [f"{name} {value:.0f} ms" for name, value in late.items() if value > max_late_ms]
    return f"the generator was late: {', '.join(said)} (bench.max_late_ms={max_late_ms:g})" if said else None
