"""A histogram that takes many values at a time, for what an engine counts by the token.

prometheus-client takes one value at a time; here a list costs one pass of numpy. What is measured stands elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np


class Buckets:
    """Counts of values by upper bounds, which belong to their buckets, and the sum of the values.

    bounds  rising; a bucket without a bound follows
    """

    __slots__ = ("_array", "_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert all(low < high for low, high in pairwise(bounds)), f"{bounds} do not rise"
        self.bounds = tuple(bounds)
        self._array = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add_all(self, values: Sequence[float]) -> None:
        if len(values) < 8:  # numpy's calls cost more than that
            for value in values:
                self.add(value)
            return
        array = np.array(values, np.float64)
        self._counts += np.bincount(self._array.searchsorted(array), minlength=len(self._counts))
        self.sum += float(array.sum())

    def copy(self) -> Buckets:
        """The same counts, out of reach of later values."""
        other = Buckets.__new__(Buckets)
        other.bounds, other._array, other._counts, other.sum = self.bounds, self._array, self._counts.copy(), self.sum
        return other

    @property
    def counts(self) -> list[int]:
        """Values of each bucket, the one without a bound last."""
        return [int(count) for count in self._counts]

    def cumulative(self) -> list[tuple[str, float]]:
        """[(upper bound as text, number of values up to it)], the last one `+Inf`."""
        bounds = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(bounds, map(float, np.cumsum(self._counts)), strict=True))
