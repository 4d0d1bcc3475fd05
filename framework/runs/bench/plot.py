"""A benchmark as one SVG: how the samples of its rounds are spread, or how its parts add up. Needs no plotting library.

Every panel says what it shows, in which unit, over how many rounds; the machine and the command stand below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import ConfigError
from framework.runs.bench.report import machine

if TYPE_CHECKING:
    from framework.runs.bench.report import Report

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, FOOT = 760, 250, 58, 24, 56, 58
INK, SOFT, GRID, MAIN = "#1f2328", "#656d76", "#e3e6ea", "#0969da"
COLOURS = ("#0969da", "#1a7f37", "#bf8700", "#cf222e", "#8250df", "#57606a")
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def write_plot(path: str, report: Report, parts: Sequence[str]) -> None:
    """ConfigError when the file cannot be written."""
    text = plot(report, parts)
    with writes_plot(path):
        Path(path).write_text(text, encoding="utf-8")


@contextmanager
def writes_plot(path: str) -> Iterator[None]:
    """Turns what the system says of the file into ConfigError."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"run.plot={path}: {reason}. Name a file in a folder that can be written") from None


def plot(report: Report, parts: Sequence[str]) -> str:
    """The SVG. parts: figures that add up, for a workload without samples."""
    names = list(dict.fromkeys(name for one in report.rounds for name in one.samples))
    panels = [_spread(report, name) for name in names if any(one.samples.get(name) for one in report.rounds)]
    if parts:
        panels.append(_bars(report, parts))
    height = TOP + PANEL_HEIGHT * len(panels) + FOOT
    body = [_text(LEFT, 30, f"bench={report.name}", size=18, weight=600), _text(LEFT, 48, _subtitle(report), SOFT, 12)]
    for number, panel in enumerate(panels):
        body.append(f"<g transform='translate(0 {TOP + number * PANEL_HEIGHT})'>{''.join(panel)}</g>")
    body.append(_text(LEFT, height - 32, ", ".join(machine().values()), SOFT, 11))
    body.append(_text(LEFT, height - 14, _shortened(report.command, 96), SOFT, 11))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'>"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>{''.join(body)}</svg>\n"
    )


def _subtitle(report: Report) -> str:
    engine = [str(report.engine[key]) for key in ("model", "dtype", "backend") if key in report.engine]
    count = len(report.rounds)
    rounds = f"{count} round{'s' * (count != 1)}" + (", interrupted" if report.interrupted else "")
    said = [f"{key} {value}" for key, value in report.options.items() if value is not None and key != "detokenize"]
    return "  ·  ".join([*([" ".join(engine)] if engine else []), rounds, ", ".join(said)])


# ----------------------------------------------------------------------------------------------------------- panels


def _spread(report: Report, name: str) -> list[str]:
    """Share of the samples at or below each value: a thin line a round, a thick one for all of them."""
    rounds = [sorted(one.samples[name]) for one in report.rounds if one.samples.get(name)]
    every = sorted(value for one in rounds for value in one)
    limit, step = _scale(every[-1])
    across, up = _Axis(LEFT, WIDTH - RIGHT, limit), _Axis(PANEL_HEIGHT - 46, 34, 1.0)
    shapes = [
        _text(LEFT, 20, f"{name}: share of {len(every)} at or below", INK, 13, 600),
        *_frame(across, up, limit, step),
    ]
    shapes += [_line(one, across, up, width=1, opacity=0.35) for one in rounds]
    shapes.append(_line(every, across, up, width=2.2, opacity=1))
    for share, label in ((0.5, "median"), (0.99, "p99")):
        value = every[min(len(every) - 1, math.ceil(share * len(every)) - 1)]
        x, y = across(value), up(share)
        end = "end" if x > WIDTH - 150 else "start"
        shapes.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{MAIN}'/>")
        shapes += _label(x + (-8 if end == "end" else 8), y + 15, f"{label} {_short(value)}", end)
    return shapes


def _line(values: Sequence[float], across: _Axis, up: _Axis, width: float, opacity: float) -> str:
    """A stair: every value lifts the share by its part."""
    points, share = [f"{across(0):.1f},{up(0):.1f}"], 0.0
    for number, value in enumerate(values, start=1):
        points.append(f"{across(value):.1f},{up(share):.1f}")
        share = number / len(values)
        points.append(f"{across(value):.1f},{up(share):.1f}")
    style = f"fill='none' stroke='{MAIN}' stroke-width='{width}' stroke-opacity='{opacity}'"
    return f"<polyline points='{' '.join(points)}' {style}/>"


def _frame(across: _Axis, up: _Axis, limit: float, step: float) -> list[str]:
    shapes = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        shapes.append(_rule(across(0), up(share), across(limit), up(share)))
        shapes.append(_text(across(0) - 8, up(share) + 4, f"{share:.0%}", SOFT, 11, anchor="end"))
    for count in range(round(limit / step) + 1):
        x = across(count * step)
        shapes.append(_rule(x, up(0), x, up(0) + 5))
        shapes.append(_text(x, up(0) + 19, f"{count * step:g}", SOFT, 11, anchor="middle"))
    return shapes


def _bars(report: Report, parts: Sequence[str]) -> list[str]:
    """A bar a round, its parts in their order, and a legend with the medians."""
    rounds = [[one.figures.get(name, 0.0) for name in parts] for one in report.rounds]
    limit, step = _scale(max(map(sum, rounds)))
    across = _Axis(LEFT + 14, WIDTH - RIGHT, limit)
    shapes = [_text(LEFT, 20, f"part by part in {report.units[parts[0]]}, a bar a round", INK, 13, 600)]
    bottom = PANEL_HEIGHT - 66
    for count in range(round(limit / step) + 1):
        x = across(count * step)
        shapes += [_rule(x, 34, x, bottom), _text(x, bottom + 16, f"{count * step:g}", SOFT, 11, anchor="middle")]
    height = min(26.0, (bottom - 40) / len(rounds) - 4)
    for number, values in enumerate(rounds):
        y, start = 40 + number * (height + 4), 0.0
        shapes.append(_text(LEFT + 4, y + height / 2 + 4, str(number + 1), SOFT, 11, anchor="end"))
        for value, colour in zip(values, cycle(COLOURS), strict=False):
            box = f"x='{across(start):.1f}' y='{y:.1f}' width='{across(start + value) - across(start):.1f}'"
            shapes.append(f"<rect {box} height='{height:.1f}' fill='{colour}'/>")
            start += value
    return [*shapes, *_legend(report, parts, PANEL_HEIGHT - 22)]


def _legend(report: Report, parts: Sequence[str], y: float) -> list[str]:
    medians, shapes, x = report.medians(), [], float(LEFT)
    for name, colour in zip(parts, cycle(COLOURS), strict=False):
        label = f"{name} {medians.get(name, 0.0):.2f}"
        shapes += [
            f"<rect x='{x:.0f}' y='{y - 9}' width='10' height='10' fill='{colour}'/>",
            _text(x + 15, y, label, INK, 11),
        ]
        x += 34 + 6.1 * len(label)
    return shapes


# ----------------------------------------------------------------------------------------------------------- shapes


class _Axis:
    """Values 0..limit to places from..to."""

    def __init__(self, start: float, end: float, limit: float) -> None:
        self._start, self._scale = start, (end - start) / limit

    def __call__(self, value: float) -> float:
        return self._start + value * self._scale


def _scale(most: float) -> tuple[float, float]:
    """(end of the axis, distance of its ticks): steps of 1, 2 or 5 times a power of ten, four to ten of them."""
    most = max(most, 1e-9)
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 8)
    return math.ceil(most / step) * step, step


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{GRID}'/>"


def _text(
    x: float, y: float, text: str, colour: str = INK, size: int = 12, weight: int = 400, anchor: str = "start"
) -> str:
    style = f"fill='{colour}' font-size='{size}' font-weight='{weight}' text-anchor='{anchor}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {FONT} {style}>{escape(text)}</text>"


def _label(x: float, y: float, text: str, anchor: str) -> list[str]:
    """A text that can be read where a line runs below it."""
    place = f"x='{x:.1f}' y='{y:.1f}' {FONT} font-size='12' text-anchor='{anchor}'"
    halo = f"<text {place} fill='none' stroke='white' stroke-width='4' stroke-linejoin='round'>{escape(text)}</text>"
    return [halo, _text(x, y, text, INK, 12, anchor=anchor)]


def _short(value: float) -> str:
    """Three figures, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
