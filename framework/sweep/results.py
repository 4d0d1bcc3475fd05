"""Results of a sweep as they are read back: jobs, what varied between them, and the combinations that were repeated.

Knows which figures say how much is done and which say how long it takes. Report and picture are made of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from framework.sweep.files import read_json
from framework.sweep.interval import Mean
from framework.sweep.job import RESULT
from framework.sweep.repetition import NUMBER

LATENCY_WORDS = ("tpot", "ttft", "itl", "e2e", "latency")
"""Figures of these names say what one request waits; the first that there is stands for them beside throughput."""


@dataclass(frozen=True)
class Job:
    """name: of its folder. words: {key: value} of its overrides. metrics: its figures, finite numbers."""

    name: str
    words: dict[str, str]
    status: str
    metrics: dict[str, float]
    units: dict[str, str]
    error: str | None
    seconds: float | None
    weights: str | None

    @property
    def repetition(self) -> str | None:
        return self.words.get(NUMBER)


@dataclass(frozen=True)
class Combination:
    """Jobs that differ in their repetition alone. words: of what varies in the sweep, without the repetition."""

    words: dict[str, str]
    jobs: list[Job]

    @property
    def label(self) -> str:
        return ", ".join(self.words.values()) or "all"

    def mean(self, figure: str) -> Mean | None:
        """Over the jobs that went well and have the figure; None when there is none."""
        values = [job.metrics[figure] for job in self._good(figure)]
        return Mean.of(values) if values else None

    def gain_on(self, other: Combination, figure: str) -> Mean | None:
        """Mean of the differences from `other`, in percent of it, over the repetitions that both have."""
        own, theirs = ({job.repetition: job.metrics[figure] for job in one._good(figure)} for one in (self, other))
        pairs = [(own[number], theirs[number]) for number in own if theirs.get(number)]
        return Mean.of([100 * (mine / their - 1) for mine, their in pairs]) if pairs else None

    def _good(self, figure: str) -> list[Job]:
        return [job for job in self.jobs if job.status == "ok" and figure in job.metrics]


@dataclass(frozen=True)
class Results:
    """All jobs of a sweep, in their order."""

    jobs: Sequence[Job]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """ConfigError for a result that is none."""
        return cls([_job(path) for path in sorted(folder.glob(f"*/{RESULT}"), key=_number)])

    @cached_property
    def varied(self) -> list[str]:
        """Keys that have several values, the repetition left out."""
        keys = dict.fromkeys(key for job in self.jobs for key in job.words)
        return [key for key in keys if key != NUMBER and len({job.words.get(key) for job in self.jobs}) > 1]

    @cached_property
    def common(self) -> list[str]:
        """Words that all jobs share."""
        words = self.jobs[0].words if self.jobs else {}
        return [f"{key}={value}" for key, value in words.items() if key not in (*self.varied, NUMBER)]

    @cached_property
    def combinations(self) -> list[Combination]:
        found: dict[tuple[str, ...], Combination] = {}
        for job in self.jobs:
            words = {key: job.words.get(key, "") for key in self.varied}
            found.setdefault(tuple(words.values()), Combination(words, [])).jobs.append(job)
        return list(found.values())

    @cached_property
    def figures(self) -> list[str]:
        """Names of all figures, in the order in which the runs give them."""
        return list(dict.fromkeys(name for job in self.jobs for name in job.metrics))

    @cached_property
    def units(self) -> dict[str, str]:
        return {name: unit for job in self.jobs for name, unit in job.units.items()}

    @cached_property
    def throughput(self) -> str | None:
        """The figure that says how much is done in a second: the first of its kind."""
        rates = (name for name in self.figures if self.units.get(name) == "1/s" or name.endswith("_per_s"))
        return next(rates, None)

    @cached_property
    def latencies(self) -> list[str]:
        """Figures that say what a request waits, one of each kind, TPOT first."""
        first = (next((name for name in self.figures if word in name.lower()), None) for word in LATENCY_WORDS)
        return [name for name in first if name is not None]

    @cached_property
    def front(self) -> list[Combination]:
        """Combinations that no other one beats in both throughput and latency, by rising latency (Pareto).

        Empty where one of the two was not measured or nothing varied.
        """
        points = list(self._points())
        return [one for x, y, one in points if not any(_beats((u, v), (x, y)) for u, v, _ in points)]

    def _points(self) -> Iterator[tuple[float, float, Combination]]:
        """(latency, throughput, combination), by latency."""
        if self.throughput is None or not self.latencies or not self.varied:
            return
        rated = [(one.mean(self.latencies[0]), one.mean(self.throughput), one) for one in self.combinations]
        known = [(x.value, y.value, one) for x, y, one in rated if x is not None and y is not None]
        yield from sorted(known, key=lambda point: point[:2])


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """As fast and as much done, and better in one of them."""
    return one != other and one[0] <= other[0] and one[1] >= other[1]


def _job(path: Path) -> Job:
    result: dict[str, Any] = read_json(path)
    words = dict(word.partition("=")[::2] for word in result["overrides"])
    return Job(
        name=path.parent.name,
        words=words,
        status=result["status"],
        metrics={name: value for name, value in result["metrics"].items() if _is_measured(value)},
        units=result.get("units", {}),
        error=result["error"],
        seconds=result.get("seconds"),
        weights=result.get("weights"),
    )


def _is_measured(value: object) -> bool:
    """A figure that is infinite or no number was not measured: no mean could hold it."""
    return isinstance(value, int | float) and math.isfinite(value)


def _number(path: Path) -> tuple[int, str]:
    name = path.parent.name
    return (int(name) if name.isdigit() else sys.maxsize, name)
