"""A histogram that takes many values at a time, for what an engine counts by the token.

prometheus-client takes one value at a time; here a list costs one pass of numpy. What is measured stands elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np


class Buckets:
    """Counts of values by upper bounds, which belong to their buckets, and the sum of the values.

    bounds  rising; a bucket without a bound follows
    """

    __slots__ = ("_array", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert all(low < high for low, high in pairwise(bounds)), f"{bounds} do not rise"
        self.bounds = tuple(bounds)
        self._array = np.array(bounds, np.float64)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add_all(self, values: Sequence[float]) -> None:
        if len(values) < 8:  # numpy's calls cost more than that
            for value in values:
                self.add(value)
            return
        array = np.array(values, np.float64)
        new = np.bincount(self._array.searchsorted(array), minlength=len(self.counts)).tolist()
        self.counts = [old + more for old, more in zip(self.counts, new, strict=True)]
        self.sum += float(array.sum())

    def copy(self) -> Buckets:
        """The same counts, out of reach of later values."""
        other = Buckets.__new__(Buckets)
        other.bounds, other._array, other.counts, other.sum = self.bounds, self._array, list(self.counts), self.sum
        return other

    def cumulative(self) -> list[tuple[str, float]]:
        """[(upper bound as text, number of values up to it)], the last one `+Inf`."""
        return list(zip([*map(_shown, self.bounds), "+Inf"], _sums(self.counts), strict=True))


def _shown(bound: float) -> str:
    return repr(float(bound))


def _sums(counts: Iterable[int]) -> list[float]:
    return np.cumsum(list(counts)).astype(float).tolist()
