"""What a benchmark has found, as figures with their spread and their floor: a line of text each, JSON and Markdown.

Nothing is measured here. Called by `benchmarks/cuda.py`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = "| part | what | median | spread | unit | floor | times the floor |"
MANY = 20
"""Values from which on the spread is told by percentiles."""


@dataclass(frozen=True)
class Figure:
    """One measured thing. values: every measurement; floor: the least time, or the highest rate, in the same unit."""

    part: str
    what: str
    unit: str
    values: Sequence[float]
    floor: float | None = None
    is_rate: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile of many values, least and most of a few."""
        if len(self.values) < MANY:
            return min(self.values), max(self.values)
        tenths = statistics.quantiles(self.values, n=10)
        return tenths[0], tenths[-1]

    @property
    def over_floor(self) -> float | None:
        """How many times the floor's time it takes; None without a floor."""
        if self.floor is None:
            return None
        return self.floor / self.median if self.is_rate else self.median / self.floor

    def record(self) -> dict[str, Any]:
        """For JSON."""
        least, most = self.spread
        told = {"median": self.median, "spread": [least, most], "over_floor": self.over_floor}
        own = {name: getattr(self, name) for name in ("part", "what", "unit", "floor", "is_rate")}
        return {**own, **told, "values": list(self.values)}

    def row(self) -> str:
        """A line of the table under `HEAD`."""
        spread = " to ".join(map(shown, self.spread)) if len(self.values) > 1 else ""
        floor, over = ("" if value is None else shown(value) for value in (self.floor, self.over_floor))
        return f"| {self.part} | {self.what} | {shown(self.median)} | {spread} | {self.unit} | {floor} | {over} |"


def shown(value: float) -> str:
    """Four figures, and all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass
class Report:
    """What a run found. Files name.json and name.md in `folder` are written anew with each addition: a run that is cut
    short keeps what it has. None writes none."""

    name: str
    folder: Path | None
    facts: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, figures: Iterable[Figure]) -> None:
        """Prints each as it comes."""
        for one in figures:
            self.figures.append(one)
            print(one.row(), flush=True)
        self.save()

    def fail(self, part: str, error: Exception) -> None:
        """A part that gave no figures."""
        self.errors.append(f"part {part} failed: {type(error).__name__}: {error}")
        self.save()

    def save(self) -> None:
        if self.folder is None:
            return
        told = {"facts": self.facts, "figures": [one.record() for one in self.figures], "errors": self.errors}
        (self.folder / f"{self.name}.json").write_text(json.dumps(told, indent=1, default=str), encoding="utf-8")
        (self.folder / f"{self.name}.md").write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Markdown: facts, the table, and what failed."""
        lines = [f"- {key}: {value}" for key, value in self.facts.items()]
        lines += ["", HEAD, "|" + "---|" * (HEAD.count("|") - 1), *(one.row() for one in self.figures)]
        lines += [f"\n{error}" for error in self.errors]
        return "\n".join(lines) + "\n"
