"""Lower bounds of min-p, top-k and top-p on the host, equal to those of the stages with these names.

Functions of `Groups`; bounds are float32 [L] arrays, -inf for none, and only tokens at or above the bound so far count.
`cpu_sampler_ops` calls them in the order of the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from framework_backends.cpu_groups import ROUGH

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework_backends.cpu_groups import Groups

    Floats = NDArray[np.float32]
    Places = NDArray[np.int64]


def min_p(groups: Groups, lo: Floats, log_min_p: Floats) -> Floats:
    """log_min_p [L], -inf for rows without."""
    return np.maximum(lo, groups.top + log_min_p)


def top_k(groups: Groups, lo: Floats, k: NDArray[np.int32]) -> Floats:
    """k [L], 0 for rows without."""
    rows = np.flatnonzero(k > 0)
    if not len(rows):
        return lo
    count = k[rows].astype(np.int64)
    falling = groups.falling(rows, count)
    kth = np.full_like(lo, -np.inf)
    kth[rows] = falling[np.arange(len(rows)), np.minimum(count, falling.shape[1]) - 1]
    return np.maximum(lo, kth)


def top_p(groups: Groups, lo: Floats, p: Floats) -> Floats:
    """p [L], 1 for rows without. Which tier settles a row depends on that row alone."""
    left = np.flatnonzero(p < 1)
    if not len(left):
        return lo
    floor = np.full_like(lo, -np.inf)
    aim = _Aim(groups, lo, p, left)
    for count in _tiers(groups):
        values = groups.falling(left, np.full(len(left), count))
        weights = torch.from_numpy(values - groups.top[left, None]).exp_().numpy()
        weights *= values >= lo[left, None]
        mass = weights.cumsum(1, dtype=np.float64)
        floor[left] = values[np.arange(len(left)), aim.num_before(left, mass[:, :-1])]
        left = left[mass[:, -1] < aim.most[left]]
        if not len(left):
            break
    return np.maximum(lo, floor)


class _Aim:
    """The mass that each row's nucleus has to reach, between least and most, float64 [L]: one number unless the mass of
    a row is rough. Rows [n] are those with a nucleus."""

    def __init__(self, groups: Groups, lo: Floats, p: Floats, rows: Places) -> None:
        self._groups, self._lo, self._p = groups, lo, p.astype(np.float64)
        self.least, self.most = np.zeros(len(p)), np.zeros(len(p))
        if groups.mass is None:
            self._set(rows, self._exact(rows), 0.0)
        else:
            self._set(rows, groups.mass[rows].sum(1, dtype=np.float64), ROUGH)

    def num_before(self, rows: Places, mass: NDArray[np.float64]) -> Places:
        """[n] how many of the best tokens do not reach it; mass [n, m] of them and those before. Of a row that least
        and most do not agree about, the mass is made exactly."""
        count = (mass < self.least[rows, None]).sum(1)
        unsure = np.flatnonzero(count != (mass < self.most[rows, None]).sum(1))
        if len(unsure):
            self._set(rows[unsure], self._exact(rows[unsure]), 0.0)
            count[unsure] = (mass[unsure] < self.least[rows[unsure], None]).sum(1)
        return count

    def _set(self, rows: Places, total: NDArray[np.float64], error: float) -> None:
        """total [n]: the mass of all tokens of the rows that are at least lo, relative to the best."""
        self.least[rows], self.most[rows] = self._p[rows] * total * (1 - error), self._p[rows] * total * (1 + error)

    def _exact(self, rows: Places) -> NDArray[np.float64]:
        groups, mass = self._groups, np.zeros((len(rows), self._groups.num_groups), np.float32)
        row, group = np.nonzero(groups.best[rows] >= self._lo[rows, None])
        mass[row, group] = groups.mass_of(rows[row] * groups.num_groups + group, self._lo)
        return np.asarray(mass.sum(1, dtype=np.float64))


def _tiers(groups: Groups) -> list[int]:
    """How many of the best tokens to look at, one after the other: peaked rows stop at the first, others are sorted."""
    size = groups.num_groups * 128
    return [count for count in (32, groups.num_groups // 2, size // 12) if count < size // 2] + [size]
