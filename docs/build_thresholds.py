"""Draws docs/thresholds.svg: what each threshold stage keeps of a sure and of an unsure distribution.

The stages themselves say what they keep; what they mean stands in docs/sampling.md, which shows the picture.
`python docs/build_thresholds.py` writes it, and a test holds it against `picture()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from framework import SamplingParams
from framework.plugins import registry
from framework.sampling.interval import inside, open_interval
from framework.testing.stages import context, make_rows, new_request

FILE = Path(__file__).with_name("thresholds.svg")

DISTRIBUTIONS = {
    "a sure model": (55, 18, 8, 5, 3.5, 2.5, 2, 1.5, 1.2, 0.9, 0.7, 0.6, 0.4, 0.3, 0.2, 0.1),
    "an unsure model": (11.5, 10.5, 10, 9, 8.5, 8, 7.5, 6.5, 6, 5.5, 4.5, 4, 3, 2.5, 2, 1),
}
"""Percent, the most likely token first."""

EXAMPLES: tuple[Mapping[str, Any], ...] = (
    {"min_p": 0.1},
    {"top_k": 4},
    {"top_p": 0.8},
    {"typical": {"mass": 0.5}},
    {"top_n_sigma": {"n": 1.0}},
    {"epsilon": {"epsilon": 0.028}},
    {"eta": {"epsilon": 0.028}},
    {"xtc": {"threshold": 0.07, "probability": 1}},
    {"top_k": 6, "top_p": 0.8},
)
"""Stages with their parameters; those of one row narrow the interval one after the other."""

LEFT, CELL, GAP, TOP, BARS, ROW = 240, 25, 40, 40, 110, 24
INK, FADED, KEPT, DROPPED = "#1f2937", "#6b7280", "#2563eb", "#e5e7eb"


@dataclass(frozen=True)
class Panel:
    """One distribution: its title, its percentages, and where its first column stands."""

    title: str
    percent: Sequence[float]
    left: int


def kept(example: Mapping[str, Any], percent: Sequence[float]) -> list[bool]:
    """Which tokens are left by the stages of an example, at temperature 1."""
    logits = torch.tensor([[math.log(p) for p in percent]])
    lo, hi = open_interval(1, logits.device)
    for name, value in example.items():
        params = SamplingParams(**({"extra_args": {name: value}} if isinstance(value, Mapping) else {name: value}))
        lo, hi = _stage(name, len(percent), params).bounds(logits, make_rows([1]), lo, hi)
    return (inside(logits, lo, hi)[0] > -torch.inf).tolist()


def _stage(name: str, vocab_size: int, params: SamplingParams) -> Any:
    target = registry().load_target("stage", name)
    stage = target(registry().build_options("stage", name, {}), context(target.spec, vocab_size))
    stage.validate(params)
    stage.add_request(1, params, new_request(1, params))
    return stage


def label(example: Mapping[str, Any]) -> str:
    """As in `min_p 0.1`, or `typical: mass 0.5`."""
    return ", then ".join(_words(name, value) for name, value in example.items())


def _words(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{name} {value:g}"
    return f"{name}: " + ", ".join(f"{parameter} {number:g}" for parameter, number in value.items())


def picture() -> str:
    """The SVG."""
    count = len(next(iter(DISTRIBUTIONS.values())))
    panels = [Panel(title, p, LEFT + i * (count * CELL + GAP)) for i, (title, p) in enumerate(DISTRIBUTIONS.items())]
    width, height = panels[-1].left + count * CELL + 16, TOP + BARS + 34 + len(EXAMPLES) * ROW + 10
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>What each threshold stage keeps of a sure and of an unsure distribution</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, TOP + BARS + 16, "percent", FADED, 11),
        *(_text(16, _row(i) + 15, label(example), INK, 13) for i, example in enumerate(EXAMPLES)),
        *(shape for panel in panels for shape in _panel(panel)),
        "</svg>",
    ]
    return "\n".join(shapes) + "\n"


def _panel(panel: Panel) -> Iterator[str]:
    yield _text(panel.left, TOP - 16, panel.title, INK, 15)
    for i, p in enumerate(panel.percent):
        x, tall = panel.left + i * CELL, BARS * p / max(panel.percent)
        yield _rect(x, TOP + BARS - tall, tall, FADED)
        yield _text(x, TOP + BARS + 16, f"{p:g}", FADED, 11)
    for i, example in enumerate(EXAMPLES):
        for j, is_kept in enumerate(kept(example, panel.percent)):
            yield _rect(panel.left + j * CELL, _row(i) + 2, ROW - 6, KEPT if is_kept else DROPPED)


def _row(index: int) -> int:
    return TOP + BARS + 34 + index * ROW


def _rect(x: float, y: float, tall: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:.1f}" width="{CELL - 3}" height="{tall:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, words: str, colour: str, size: int) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
    print(FILE.name)
