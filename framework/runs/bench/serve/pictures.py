"""The curves of a load test as one SVG: latency, throughput and goodput against the load. Drawn with matplotlib.

A figure stands for the median over the rounds, a band for their least and most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError
from framework.runs.bench.plot import writes_plot
from framework.runs.bench.report import machine

if TYPE_CHECKING:
    from framework.runs.bench.report import Report

Points = Mapping[float, Sequence[Mapping[str, float]]]
"""{load: figures of each round}."""
AXES = {"rate": "requests a second that are sent", "concurrency": "requests under way"}
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df")
QUANTILES = (("p50", "-"), ("p99", "--"))


def draw(path: str, report: Report) -> None:
    """Writes the SVG. ConfigError when the file cannot be written, or when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "run.plot needs the module 'matplotlib'. Install it with: pip install 'framework[bench]'"
        ) from None
    name, points = points_of(report)
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    grid = figure.subplots(2, 2)
    for place, metric in zip((grid[0][0], grid[0][1]), ("TTFT", "TPOT"), strict=True):
        _panel(place, name, points, f"{metric}, ms", [(f"{metric}, {q}", q, style) for q, style in QUANTILES])
    _panel(grid[1][0], name, points, "tokens a second", [("output tokens", "output tokens", "-")])
    per_second = [("requests", "answered", "-"), ("goodput", "within the limits", "--")]
    _panel(grid[1][1], name, points, "requests a second", per_second)
    server = str(report.engine.get("server", ""))
    title = f"bench=serve  ·  {server} {report.engine.get('model', '')}"
    figure.suptitle(f"{title}\n{', '.join(machine().values())}", fontsize=10)
    figure.supxlabel(report.command[:150], fontsize=7, color="#656d76")
    with writes_plot(path):
        figure.savefig(Path(path), format="svg")


def points_of(report: Report) -> tuple[str, dict[float, list[Mapping[str, float]]]]:
    """(what the load is, {load: figures of its rounds}), loads in their order; one of 0 where all came at once."""
    found: dict[float, list[Mapping[str, float]]] = {}
    name = "rate"
    for one in report.rounds:
        for point in one.points:
            ((name, load),) = (point["load"] or {"all at once": 0.0}).items()
            found.setdefault(float(load), []).append(point["figures"])
    return name, dict(sorted(found.items()))


def _panel(place: Any, name: str, points: Points, unit: str, lines: Sequence[tuple[str, str, str]]) -> None:
    loads = list(points)
    for (figure, label, style), colour in zip(lines, COLOURS, strict=False):
        known = [load for load in loads if any(figure in one for one in points[load])]
        values = [[one[figure] for one in points[load] if figure in one] for load in known]
        if not known:
            continue
        place.plot(known, [median(one) for one in values], style, color=colour, marker="o", markersize=4, label=label)
        place.fill_between(known, [min(one) for one in values], [max(one) for one in values], color=colour, alpha=0.15)
    if len(loads) > 2 and loads[0] > 0 and loads[-1] / loads[0] >= 4:
        place.set_xscale("log", base=2)
        place.set_xticks(loads, [f"{load:g}" for load in loads])
        place.minorticks_off()
    place.set_ylim(bottom=0)
    place.set_ylabel(unit)
    place.set_xlabel(AXES.get(name, name))
    place.grid(color="#e3e6ea")
    place.spines[["top", "right"]].set_visible(False)
    if place.lines:
        place.legend(frameon=False, fontsize=9)
