"""The table of a sweep: a row for each point, medians over the rounds; and what is to be said about the points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from framework.runs.bench.serve.figures import label_of

if TYPE_CHECKING:
    from framework.interfaces import BenchRound

COLUMNS = {
    "answered/s": ("requests", "{:.2f}"), "goodput/s": ("goodput", "{:.2f}"),
    "out tok/s": ("output tokens", "{:,.0f}"), "TTFT p50": ("TTFT, p50", "{:,.1f}"), "p90": ("TTFT, p90", "{:,.1f}"),
    "p99 ms": ("TTFT, p99", "{:,.1f}"), "TPOT p50": ("TPOT, p50", "{:,.1f}"), "p99  ms": ("TPOT, p99", "{:,.1f}"),
    "ITL p99 ms": ("ITL, p99", "{:,.1f}"), "E2E p50": ("E2E, p50", "{:,.0f}"), "p99   ms": ("E2E, p99", "{:,.0f}"),
    "errors": ("errors", "{:.0f}"), "cut off": ("cut off", "{:.0f}"),
}  # fmt: skip
"""Headings of the columns, each with its figure. JSON has all the figures of a point."""


def point_rows(rounds: Sequence[BenchRound]) -> list[tuple[str, ...]]:
    """Rows of cells, the heading first; columns that no point has, or that are 0 in all of them, are left out."""
    labels: dict[str, list[Mapping[str, Any]]] = {}
    for one in rounds:
        for point in one.points:
            labels.setdefault(label_of(point["load"]), []).append(point)
    found = {label: _medians(points) for label, points in sorted(labels.items(), key=_load)}
    shown = [
        heading for heading, (figure, _) in COLUMNS.items()
        if any(figures.get(figure) for figures in found.values())
    ]  # fmt: skip
    rows = [("", *(heading.replace("  ", " ").replace("  ", " ") for heading in shown))]
    for label, figures in found.items():
        mark = " *" if any(point["late"] for point in labels[label]) else ""
        cells = [COLUMNS[h][1].format(figures[COLUMNS[h][0]]) if COLUMNS[h][0] in figures else "-" for h in shown]
        rows.append((label + mark, *cells))
    return _aligned(rows)


def remarks(rounds: Sequence[BenchRound]) -> list[str]:
    """Lines about points that are doubtful, and about errors: how many of each kind, and what one of them said."""
    lines, errors, said = [], {}, {}  # type: list[str], dict[str, int], dict[str, str]
    for one in rounds:
        for point in sorted(one.points, key=lambda point: next(iter(point["load"].values()), 0.0)):
            label = label_of(point["load"])
            if point["late"]:
                lines.append(f"* {label}: {point['late']}; its latencies may be too high by as much")
            if point["counted_by"] == "chunks" and point["figures"].get("requests"):
                said.setdefault("", "tokens are counted as chunks: the server tells no usage")
            for kind, number in point["errors"].items():
                errors[kind] = errors.get(kind, 0) + number
                said.setdefault(kind, point["messages"].get(kind, ""))
    lines += [said.pop("")] if "" in said else []
    lines += [f"{number} times {kind}" + (f": {said[kind]}" if said[kind] else "") for kind, number in errors.items()]
    return list(dict.fromkeys(lines))


def _load(labelled: tuple[str, Sequence[Mapping[str, Any]]]) -> float:
    return next(iter(labelled[1][0]["load"].values()), 0.0)


def _medians(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for point in points for name in point["figures"])
    return {name: median([p["figures"][name] for p in points if name in p["figures"]]) for name in names}


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        tuple(cell.rjust(w) if i else cell for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]
