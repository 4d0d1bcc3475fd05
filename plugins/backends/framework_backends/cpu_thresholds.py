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


_BEYOND = 0.15
"""Share of what a nucleus leaves out that the groups of the best tokens may leave out, so that those alone reach it."""


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
    """p [L], 1 for rows without. What settles a row depends on that row alone."""
    rows = np.flatnonzero(p < 1)
    if not len(rows):
        return lo
    search = _Search(groups, lo, p, rows)
    if (lo[rows] > -np.inf).all():
        search.look_at_all_kept()
    else:
        search.look_at_best()
    return np.maximum(lo, search.floor)


class _Search:
    """The smallest token of the nucleus of each row, `floor` [L]; rows [n] `left` have not found theirs.

    What a nucleus has to reach lies between least and most, float64 [L]: one number unless the row's mass is rough.
    """

    def __init__(self, groups: Groups, lo: Floats, p: Floats, rows: Places) -> None:
        self._groups, self._lo, self._p, self.left = groups, lo, p.astype(np.float64), rows
        self.floor = np.full_like(lo, -np.inf)
        self._least, self._most = np.zeros(len(p)), np.zeros(len(p))

    def look_at_all_kept(self) -> None:
        values = self._groups.falling_to(self.left, self._lo[self.left])
        mass = self._running_mass(values)
        self._aim(self.left, mass[:, -1], ROUGH)
        self._settle(values, mass)

    def look_at_best(self) -> None:
        groups, left = self._groups, self.left
        if groups.mass is None:
            self._aim(left, self._exact(left), 0.0)
        else:
            self._aim(left, groups.mass[left].sum(1, dtype=np.float64), ROUGH)
            values = groups.falling_to(left, groups.likely_bound(left, 1 - (1 - self._p[left]) * _BEYOND))
            self._settle(values, self._running_mass(values))
        for count in _tiers(groups):
            if not len(self.left):
                break
            values = groups.falling(self.left, np.full(len(self.left), count))
            self._settle(values, self._running_mass(values))

    def _running_mass(self, values: Floats) -> NDArray[np.float64]:
        """[n, m] mass of each token and those before it, of tokens [n, m] of the rows that are left."""
        weights = torch.from_numpy(values - self._groups.top[self.left, None]).exp_().numpy()
        weights *= values >= self._lo[self.left, None]
        return weights.cumsum(1, dtype=np.float64)

    def _settle(self, values: Floats, mass: NDArray[np.float64]) -> None:
        """Best tokens of the rows that are left [n, m], with their running mass."""
        rows, before = self.left, mass[:, :-1]
        count = (before < self._least[rows, None]).sum(1)
        unsure = np.flatnonzero(count != (before < self._most[rows, None]).sum(1))
        if len(unsure):
            self._aim(rows[unsure], self._exact(rows[unsure]), 0.0)
            count[unsure] = (before[unsure] < self._least[rows[unsure], None]).sum(1)
        self.floor[rows] = values[np.arange(len(rows)), count]
        self.left = rows[mass[:, -1] < self._most[rows]]

    def _aim(self, rows: Places, total: NDArray[np.float64], error: float) -> None:
        """total [n]: the mass of all tokens of the rows that are at least lo, relative to the best."""
        self._least[rows], self._most[rows] = self._p[rows] * total * (1 - error), self._p[rows] * total * (1 + error)

    def _exact(self, rows: Places) -> NDArray[np.float64]:
        groups, mass = self._groups, np.zeros((len(rows), self._groups.num_groups), np.float32)
        row, group = np.nonzero(groups.best[rows] >= self._lo[rows, None])
        mass[row, group] = groups.mass_of(rows[row] * groups.num_groups + group, self._lo)
        return np.asarray(mass.sum(1, dtype=np.float64))


def _tiers(groups: Groups) -> list[int]:
    """How many of the best tokens to look at, one after the other: peaked rows stop at the first, others are sorted."""
    size = groups.num_groups * 128
    return [count for count in (32, groups.num_groups // 2, size // 12) if count < size // 2] + [size]
