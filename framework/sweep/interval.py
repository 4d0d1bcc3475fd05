"""Means with their confidence intervals, by Student's t: for a handful of repetitions. Table and picture use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

from framework.runs.figures import number

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """value +- half_width holds the true mean in 95 of 100 cases; half_width is None for a single value."""

    value: float
    half_width: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """values: independent, of about normal spread, at least one."""
        n = len(values)
        if n == 1:
            return cls(values[0], None, 1)
        return cls(fmean(values), student_t(n - 1) * stdev(values) / math.sqrt(n), n)

    def __str__(self) -> str:
        if self.half_width is None:
            return number(self.value)
        return f"{number(self.value)} ± {number(self.half_width)}"


@cache
def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """t for which a share `confidence` of Student's distribution lies between -t and t; degrees >= 1.

    The share is A(t|v) of Abramowitz and Stegun, 26.7.3 and 26.7.4, which rises with t: halving an interval finds it.
    """
    low, high = 0.0, 1.0
    while _share_within(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, degrees) < confidence else (low, middle)
    return high


def _share_within(t: float, degrees: int) -> float:
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine if is_odd else 1.0), 0.0
    for k in range(1, degrees // 2 + 1):
        total += term
        term *= cosine**2 * (2 * k / (2 * k + 1) if is_odd else (2 * k - 1) / (2 * k))
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
