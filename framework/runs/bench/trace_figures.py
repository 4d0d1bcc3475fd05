"""What a profiler's trace says of a step: launches, copies, waits, busy time, and what takes the most of it.

Reads events of Chrome's format as torch writes them, of whatever device; makes figures, text and JSON. The trace is
made in `profile`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from framework.runs.table import table

BEGIN, END = "profiled steps begin", "profiled steps end"
"""Ranges of the trace between which the steps stand that are told of."""
NUM_TOP = 10
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = {
    "kernel launches": r"LaunchKernel|LaunchCooperativeKernel",
    "graph launches": r"GraphLaunch",
    "waits for an event": r"EventSynchronize",
    "other synchronisations": r"(Stream|Device|Ctx)Synchronize|Memcpy(?!.*Async)",
}
"""What the host asks of a device, by the name of the call in the device's library."""
_COPIES = {"copies to the device": "HtoD", "copies to the host": "DtoH", "copies on the device": "DtoD"}

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """us and calls are those of a step."""

    name: str
    us: float
    calls: float


@dataclass(frozen=True)
class TraceFigures:
    """counts: of a step. busy_us: time of a step in which the device computed or copied, None without a device.

    parts  ranges of the host's work; kernels: what took the most time on the device, or operators on the host
    """

    num_steps: int
    wall_us: float
    busy_us: float | None
    counts: dict[str, float]
    parts: list[Cost]
    kernels: list[Cost]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, width: int | None) -> list[str]:
        """The page for a terminal, without a title."""
        rows = [("wall time", f"{self.wall_us:,.1f}", "us")]
        if self.busy_us is not None:
            rows.append(("device busy", f"{self.busy_us:,.1f}", f"us, {self.busy_us / self.wall_us:.1%}"))
        rows += [(name, f"{count:,.1f}", "") for name, count in self.counts.items()]
        size = max(len(number) for _, number, _ in rows)
        lines = table([(name, number.rjust(size), unit) for name, number, unit in rows], width, "  ")
        for title, costs in (("host, by part", self.parts), (self.most, self.kernels)):
            lines += ["", *table(_cost_rows(title, costs, self.wall_us), width, "  ")] if costs else []
        return lines

    @property
    def most(self) -> str:
        return "operators" if self.busy_us is None else "kernels"


def _cost_rows(title: str, costs: Sequence[Cost], wall_us: float) -> list[tuple[str, ...]]:
    """Numbers to the right, the name last: it may be long."""
    rows = [("us", "of the step", "calls", title)]
    rows += [(f"{c.us:,.1f}", f"{c.us / wall_us:.1%}", f"{c.calls:,.1f}", c.name) for c in costs]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [(*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]) for row in rows]


def figures_of(events: Iterable[Event], num_steps: int) -> TraceFigures:
    """Figures of the steps between the ranges `BEGIN` and `END`, of which there is one each."""
    timed = [event for event in events if event.get("ph") == "X"]
    start = next(_end(event) for event in timed if event["name"] == BEGIN)
    end = next(event["ts"] for event in timed if event["name"] == END)
    inside = [event for event in timed if start <= event["ts"] < end]
    on_device = [event for event in inside if event.get("cat") in _ON_DEVICE]
    if on_device:
        most = _costs([(event["name"], event["dur"]) for event in on_device], num_steps)
        counts = {name: count / num_steps for name, count in _counts(inside, on_device).items()}
        busy_us = _union([(event["ts"], min(_end(event), end)) for event in on_device]) / num_steps
    else:
        most = _costs(_self_times([event for event in inside if event.get("cat") == "cpu_op"]), num_steps)
        counts = {"operators": sum(event.get("cat") == "cpu_op" for event in inside) / num_steps}
        busy_us = None
    ranges = [(event["name"], event["dur"]) for event in inside if event.get("cat") == "user_annotation"]
    parts, wall_us = _costs(ranges, num_steps), (end - start) / num_steps
    return TraceFigures(num_steps, wall_us, busy_us, counts, parts, most[:NUM_TOP])


def _counts(inside: Sequence[Event], on_device: Sequence[Event]) -> dict[str, int]:
    calls = [event["name"] for event in inside if re.search("_(runtime|driver)$", event.get("cat", ""))]
    copies = [event["name"] for event in on_device if event["cat"] == "gpu_memcpy"]
    counts = {"kernels": sum(event["cat"] == "kernel" for event in on_device)}
    counts |= {what: sum(bool(re.search(names, call)) for call in calls) for what, names in _CALLS.items()}
    return counts | {what: sum(way in copy for copy in copies) for what, way in _COPIES.items()}


def _costs(times: Iterable[tuple[str, float]], num_steps: int) -> list[Cost]:
    """[(name, us)] by name, the most expensive first."""
    sums: dict[str, list[float]] = {}
    for name, us in times:
        sums.setdefault(name, []).append(us)
    costs = [Cost(name, sum(each) / num_steps, len(each) / num_steps) for name, each in sums.items()]
    return sorted(costs, key=lambda cost: -cost.us)


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _self_times(events: Sequence[Event]) -> list[tuple[str, float]]:
    """(name, us) of each event without those that it called in its thread."""
    times: list[list[Any]] = []
    open_in: dict[Any, list[tuple[float, list[Any]]]] = {}
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        around = open_in.setdefault((event["pid"], event["tid"]), [])
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        if around:
            around[-1][1][1] -= event["dur"]
        times.append([event["name"], event["dur"]])
        around.append((_end(event), times[-1]))
    return [(name, us) for name, us in times]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
