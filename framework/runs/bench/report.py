"""What a benchmark found, and where: figures with their spread, machine, versions, command. Makes text and JSON."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from framework.runs.figures import number
from framework.runs.table import paragraph, table, terminal_width, title

if TYPE_CHECKING:
    from framework.interfaces import BenchRound
    from framework.runs.bench.trace_figures import TraceFigures

SHOWN_FACTS = (
    "model",
    "dtype",
    "backend",
    "attention",
    "max_model_len",
    "block_size",
    "num_blocks",
    "async_scheduling",
    "server",
    "api",
    "prompts",
    "ignore_eos",
    "tokens",
    "salt",
)


@dataclass
class Report:
    """What a page and a file are made from.

    name, options  the workload; shown: options that the page tells, None for all of them
    units          of each figure, in the order in which they are shown
    """

    name: str
    options: dict[str, Any]
    units: dict[str, str]
    warmup: int
    num_rounds: int
    command: str
    engine: dict[str, Any] = field(default_factory=dict)
    rounds: list[BenchRound] = field(default_factory=list)
    interrupted: bool = False
    profile: TraceFigures | None = None
    shown: Mapping[str, Any] | None = None

    def figures(self) -> dict[str, dict[str, Any]]:
        """{figure: median, min, max over the rounds, unit}."""
        found = {}
        for name, unit in self.units.items():
            values = [one.figures[name] for one in self.rounds if name in one.figures]
            if values:
                found[name] = {"median": median(values), "min": min(values), "max": max(values), "unit": unit}
        return found

    def medians(self) -> dict[str, float]:
        return {name: one["median"] for name, one in self.figures().items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": self.name,
            "options": self.options,
            "command": self.command,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "versions": versions(),
            "engine": self.engine,
            "warmup_rounds": self.warmup,
            "interrupted": self.interrupted,
            "figures": self.figures(),
            "rounds": [
                {"figures": one.figures, "samples": one.samples, **({"points": one.points} if one.points else {})}
                for one in self.rounds
            ],
            **({} if self.profile is None else {"profile": self.profile.as_json()}),
        }

    def figure_lines(self) -> list[str]:
        """A line a figure: its median, least and most over the rounds."""
        rows: list[tuple[str, ...]] = [("", "median", "least", "most", "unit")]
        for name, one in self.figures().items():
            rows.append((name, *(number(one[key]) for key in ("median", "min", "max")), one["unit"]))
        return table(_right(rows), terminal_width(), "  ")

    def lines(self, own: Sequence[str] | None = None) -> list[str]:
        """The page for a terminal. own: what the workload shows instead of a line a figure."""
        width, count = terminal_width(), len(self.rounds)
        spread = f"{count} round{'s' * (count != 1)} after {self.warmup} of warm-up"
        if self.interrupted:
            spread += f"; interrupted, {self.num_rounds} were asked for"
        facts = {
            "workload": _words(self.options if self.shown is None else self.shown),
            "engine": _words({key: self.engine[key] for key in SHOWN_FACTS if key in self.engine}),
            "machine": ", ".join(f"{value}" for value in machine().values()),
            "versions": _words(versions()),
            "command": self.command,
        }
        figures = self.figure_lines() if own is None else own
        lines = [title(f"bench={self.name}"), *paragraph(spread, width, "  "), *figures, ""]
        if self.profile is not None:
            lines += [title(f"a step, of {self.profile.num_steps} profiled"), *self.profile.lines(width), ""]
        return [*lines, *table([(key, value) for key, value in facts.items() if value], width, "  ")]


def machine() -> dict[str, str]:
    """What the figures depend on: processor, its cores, memory, system."""
    threads = "torch" in sys.modules and sys.modules["torch"].get_num_threads()
    return {
        "processor": _processor(),
        "cores": f"{os.cpu_count()} cores" + (f" ({threads} threads of torch)" if threads else ""),
        "memory": f"{_memory_bytes() / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    from importlib.metadata import version

    from framework import __version__

    return {"framework": __version__, "python": platform.python_version(), "torch": version("torch")}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named.partition(":")[2].strip() or platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {'null' if value is None else value}" for key, value in values.items())


def _right(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Cells of the columns of numbers, put to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        tuple(cell.rjust(width) if 0 < i < 4 else cell for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
