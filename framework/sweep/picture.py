"""`results.png`: figures of a sweep against what varied in it, and throughput against latency. Needs matplotlib.

One number that varied becomes the axis below lines; anything else, groups of bars. Error bars are the 95 % confidence
intervals of the report. Called by the report alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.sweep.interval import Mean
from framework.sweep.results import Combination, Results

MAX_PANELS = 3
"""Of figures; the one of throughput against latency comes beside them."""
MAX_SERIES = 10
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#57606a", "#0a7ea4", "#e16f24", "#7a8b00", "#b3368a")
INK, SOFT, GRID = "#1f2328", "#656d76", "#e3e6ea"


@dataclass(frozen=True)
class Layout:
    """What stands where. across: the key along the axis below, None when nothing varied; its values in order.

    is_numeric  whether they are numbers, so that lines may join them
    series      {label: combinations}, a colour each
    """

    across: str | None
    values: list[str]
    is_numeric: bool
    series: dict[str, list[Combination]]


def layout_of(results: Results) -> Layout:
    """The numeric key with the most values goes across, else the key with the most; the others make the series.

    Of keys with as many values, the last typed goes across.
    """
    if not results.varied:
        return Layout(None, [""], False, {"": results.combinations})
    values = {key: list(dict.fromkeys(one.words[key] for one in results.combinations)) for key in results.varied}
    numeric = [key for key in results.varied if all(_is_number(value) for value in values[key])]
    across = max(reversed(numeric or results.varied), key=lambda key: len(values[key]))
    series: dict[str, list[Combination]] = {}
    for one in results.combinations:
        label = ", ".join(f"{_short(key)}={one.words[key]}" for key in results.varied if key != across)
        series.setdefault(label, []).append(one)
    ordered = sorted(values[across], key=float) if numeric else values[across]
    return Layout(across, ordered, bool(numeric), series)


def panels_of(results: Results) -> list[str]:
    """Figures that are drawn: throughput and latencies, or the first ones where a run has neither."""
    chosen = [name for name in (results.throughput, *results.latencies) if name is not None] or results.figures
    return chosen[:MAX_PANELS]


def write_picture(path: Path, results: Results) -> bool:
    """Draws the sweep; False, and no file, when no job has a figure. ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    names, layout = panels_of(results), layout_of(results)
    if not names:
        return False
    with_front = len(results.front) > 0 and len(results.combinations) > 1
    num_panels = len(names) + with_front
    columns = 2 if num_panels > 1 else 1
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(5.4 * columns, 3.5 * rows + 0.5 + 0.18 * len(layout.series)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, name in zip(grid, names, strict=False):
        _panel(axes, results, layout, name)
    if with_front:
        _front(grid[len(names)], results, layout)
    for axes in grid[num_panels:]:
        axes.set_visible(False)
    _legend(figure, grid[0], layout)
    part = path.with_name(f".{path.name}")
    figure.savefig(part, format="png", dpi=100)
    part.replace(path)
    return True


# ----------------------------------------------------------------------------------------------------------- panels


def _panel(axes: Any, results: Results, layout: Layout, name: str) -> None:
    unit = results.units.get(name)
    n = {mean.n for one in results.combinations if (mean := one.mean(name)) is not None}
    _dress(axes, f"{name}{f', {unit}' if unit else ''}{_said_of(n)}")
    draw = _lines if layout.is_numeric and len(layout.values) > 1 else _bars
    draw(axes, layout, name)
    axes.set_ylim(bottom=0)
    if layout.across is not None:
        axes.set_xlabel(layout.across, color=SOFT)


def _said_of(n: set[int]) -> str:
    if n <= {1}:
        return ""
    return f"  (mean, 95 % interval, n = {' to '.join(map(str, sorted({min(n), max(n)})))})"


def _lines(axes: Any, layout: Layout, name: str) -> None:
    for colour, combinations in zip(_colours(layout), layout.series.values(), strict=False):
        found = [(float(one.words[str(layout.across)]), one.mean(name)) for one in combinations]
        points = sorted((x, mean) for x, mean in found if mean is not None)
        across, means = [x for x, _ in points], [mean for _, mean in points]
        values, widths = [mean.value for mean in means], _widths(means)
        axes.errorbar(across, values, yerr=widths, color=colour, marker="o", markersize=4, capsize=3, linewidth=1.5)
    axes.set_xticks([float(value) for value in layout.values], layout.values)


def _bars(axes: Any, layout: Layout, name: str) -> None:
    width = 0.8 / min(len(layout.series), MAX_SERIES)
    for number, (colour, combinations) in enumerate(zip(_colours(layout), layout.series.values(), strict=False)):
        by_value = {"" if layout.across is None else one.words[layout.across]: one.mean(name) for one in combinations}
        found = [(place, by_value.get(value)) for place, value in enumerate(layout.values)]
        points = [(place, mean) for place, mean in found if mean is not None]
        places = [place + (number + 0.5) * width - 0.4 for place, _ in points]
        means = [mean for _, mean in points]
        heights = [mean.value for mean in means]
        axes.bar(places, heights, width * 0.92, yerr=_widths(means), color=colour, ecolor=INK, capsize=3)
    axes.set_xticks(range(len(layout.values)), layout.values)


def _front(axes: Any, results: Results, layout: Layout) -> None:
    """Throughput against latency, a point a combination; the front is joined by a line and named."""
    throughput, latency = str(results.throughput), results.latencies[0]
    _dress(axes, "throughput against latency, Pareto front marked")
    axes.set_xlabel(_named(results, latency), color=SOFT)
    axes.set_ylabel(_named(results, throughput), color=SOFT)
    for colour, combinations in zip(_colours(layout), layout.series.values(), strict=False):
        means = [(one.mean(latency), one.mean(throughput)) for one in combinations]
        pairs = [(x, y) for x, y in means if x is not None and y is not None]
        across, up = [x for x, _ in pairs], [y for _, y in pairs]
        axes.errorbar(
            [x.value for x in across], [y.value for y in up], xerr=_widths(across), yerr=_widths(up),
            color=colour, marker="o", markersize=5, linestyle="", elinewidth=0.8,
        )  # fmt: skip
    ends = [(one, one.mean(latency), one.mean(throughput)) for one in results.front]
    places = [(one, x.value, y.value) for one, x, y in ends if x is not None and y is not None]
    axes.plot([x for _, x, _ in places], [y for _, _, y in places], color=INK, linewidth=1, linestyle="--", zorder=1)
    for one, x, y in places:
        axes.plot([x], [y], marker="o", markersize=11, markerfacecolor="none", markeredgecolor=INK, linestyle="")
        axes.annotate(one.label, (x, y), xytext=(8, -12), textcoords="offset points", fontsize=7.5, color=INK)
    axes.margins(x=0.25, y=0.15)


# ------------------------------------------------------------------------------------------------------------ marks


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(True, axis="both", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)


def _legend(figure: Any, axes: Any, layout: Layout) -> None:
    labels = list(layout.series)
    if len(labels) < 2:
        return
    if len(labels) > MAX_SERIES:
        labels = [*labels[:MAX_SERIES], f"and {len(labels) - MAX_SERIES} more, not drawn"]
    from matplotlib.patches import Patch

    colours = [*_colours(layout), "none"]
    handles = [Patch(color=colour, label=label) for colour, label in zip(colours, labels, strict=False)]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)


def _colours(layout: Layout) -> Sequence[str]:
    return COLOURS[: min(len(layout.series), MAX_SERIES)]


def _widths(means: Sequence[Mean]) -> list[float] | None:
    """Half widths of the error bars, None where no value was repeated."""
    if all(mean.half_width is None for mean in means):
        return None
    return [mean.half_width or 0.0 for mean in means]


def _named(results: Results, name: str) -> str:
    return f"{name}, {results.units[name]}" if name in results.units else name


def _short(key: str) -> str:
    """`max_num_seqs` of scheduler.max_num_seqs."""
    return key.rpartition(".")[2]


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False
