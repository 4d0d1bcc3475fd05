"""The rate at which a server is saturated: the lowest that reaches nearly the most it can do. Knows no server.

The rate is doubled until its worth (goodput, or requests a second) stops growing; the gap around the best rate is then
halved, on a logarithmic scale, until it is small or the number of points is spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

GROWTH = 1.05
"""A rate is better when its worth is so many times that of a lower one: less is noise."""
CLOSE = 1.15
"""Neighbours whose ratio is below it are not told apart."""


def search(worth: Callable[[float], float], start: float, max_points: int) -> float:
    """The best rate among at most `max_points` that are tried, beginning with `start`."""
    found = {start: worth(start)}
    _double(found, worth, max_points)
    if not any(found.values()):
        return start
    while len(found) < max_points and min(found) == best_of(found):
        lower = min(found) / 2  # even the lowest is beyond what the server can do: look below
        found[lower] = worth(lower)
    while len(found) < max_points and (middle := _middle(found)) is not None:
        found[middle] = worth(middle)
    return best_of(found)


def best_of(found: dict[float, float]) -> float:
    """The lowest rate whose worth is nearly the most."""
    most = max(found.values())
    return min(rate for rate, value in found.items() if value * GROWTH >= most)


def _double(found: dict[float, float], worth: Callable[[float], float], max_points: int) -> None:
    while len(found) < max_points:
        rate = 2 * max(found)
        found[rate] = worth(rate)
        if found[rate] <= GROWTH * found[rate / 2]:
            return


def _middle(found: dict[float, float]) -> float | None:
    """The middle of the wider gap beside the best rate, in three figures; None when both are small."""
    rates, best = sorted(found), best_of(found)
    at = rates.index(best)
    gaps = [(after / before, float(f"{math.sqrt(before * after):.3g}")) for before, after in pairwise(rates)]
    beside = [gap for gap in gaps[max(0, at - 1) : at + 1] if gap[0] > CLOSE]
    return max(beside)[1] if beside else None
