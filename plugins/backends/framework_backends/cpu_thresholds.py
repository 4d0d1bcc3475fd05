"""Lower bounds of min-p, top-k and top-p on the host, equal to those of the stages with these names.

Functions of `Groups`; bounds are float32 [L] arrays, -inf for none, and only tokens at or above the bound so far count.
`cpu_sampler_ops` calls them in the order of the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from framework_backends.cpu_groups import ROUGH_TOP, rough_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework_backends.cpu_groups import Falling, Groups

    Floats = NDArray[np.float32]
    Places = NDArray[np.int64]


_BEYOND = 0.15, 0.0003
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
    kth = np.full_like(lo, -np.inf)
    kth[rows] = groups.falling(rows, count).at(count - 1)
    return np.maximum(lo, kth)


def top_p(groups: Groups, lo: Floats, p: Floats) -> Floats:
    """p [L], 1 for rows without. What is kept of a row depends on that row alone: where a rough mass is not enough to
    say so, an exact one decides."""
    wanting = p < 1
    search = _Search(groups, lo, p.astype(np.float64))
    search.among_kept(np.flatnonzero(wanting & (lo > -np.inf)))
    if groups.mass is not None:
        for beyond in _BEYOND:
            search.among_best(np.flatnonzero(wanting & (lo == -np.inf) & ~search.is_found), beyond)
    search.exactly(np.flatnonzero(wanting & ~search.is_found))
    return np.maximum(lo, search.floor)


class _Search:
    """The smallest token of each nucleus, `floor` [L], where it `is_found` [L]."""

    def __init__(self, groups: Groups, lo: Floats, p: NDArray[np.float64]) -> None:
        self._groups, self._lo, self._p = groups, lo, p
        self.floor, self.is_found = np.full_like(lo, -np.inf), np.zeros(len(lo), bool)

    def among_kept(self, rows: Places) -> None:
        """Of rows [n] with a bound: all that counts is listed."""
        if len(rows):
            best = self._groups.falling_to(rows, self._lo[rows])
            mass, num_kept = self._running_mass(best), _num(best, best.tokens >= self._lo[rows][best.place])
            self._settle(best, mass, np.append(mass, np.nan)[best.start + num_kept - 1])

    def among_best(self, rows: Places, beyond: float) -> None:
        """Of rows [n] without: the groups of the best tokens leave out `beyond` of what a nucleus leaves out."""
        if len(rows):
            assert self._groups.mass is not None
            best = self._groups.falling_to(rows, self._groups.likely_bound(rows, 1 - (1 - self._p[rows]) * beyond))
            total = self._groups.mass[rows].sum(1, dtype=np.float64) / np.exp(self._groups.top[rows], dtype=np.float64)
            self._settle(best, self._running_mass(best), total)

    def exactly(self, rows: Places) -> None:
        if len(rows):
            self.floor[rows] = _exact_floor(self._groups, self._lo, self._p, rows)

    def _settle(self, best: Falling, mass: NDArray[np.float64], total: NDArray[np.float64]) -> None:
        """Finds floors that lie among the best. total [n]: rough mass of all that counts."""
        top = np.abs(self._groups.top[best.rows])
        aim, error = self._p[best.rows] * total, rough_error(top)
        count = _num(best, mass < (aim * (1 - error))[best.place])
        most = _num(best, mass < (aim * (1 + error))[best.place])
        self.floor[best.rows] = best.at(count)
        is_there = (most < best.count) & (top <= ROUGH_TOP)
        self.is_found[best.rows] = is_there & (count == most)
        for place in np.flatnonzero(is_there & (count != most)).tolist():
            self._settle_exactly(int(best.rows[place]), best.of(place))

    def _settle_exactly(self, row: int, tokens: Floats) -> None:
        """tokens [m]: the best of the row, in falling order."""
        groups, lo = self._groups, self._lo[row]
        aim = self._p[row] * _exact_mass(groups, self._lo, np.array([row]))[0]
        reached = (_exact_weights(tokens, groups.top[row]) * (tokens >= lo)).cumsum(dtype=np.float64)
        self.floor[row] = tokens[(reached[:-1] < aim).sum()]
        self.is_found[row] = reached[-1] >= aim

    def _running_mass(self, best: Falling) -> NDArray[np.float64]:
        """Mass of each token and those before it in its row, roughly; a row that is not numbers spoils no other."""
        below = np.fmin(best.tokens - self._groups.top[best.rows][best.place], np.float32(0))
        mass: NDArray[np.float64] = np.exp(below).cumsum(dtype=np.float64)
        mass -= np.append(0.0, mass)[best.start[best.place]]
        return mass


def _num(best: Falling, is_counted: NDArray[np.bool_]) -> Places:
    """[n] how many tokens of each row are counted."""
    return np.bincount(best.place[is_counted], minlength=len(best.rows))


def _exact_mass(groups: Groups, lo: Floats, rows: Places) -> NDArray[np.float64]:
    """[n] mass of the tokens of each row that are at least lo [L], as the stage sums it up."""
    mass = np.zeros((len(rows), groups.num_groups), np.float32)
    row, group = np.divmod(np.flatnonzero(groups.best[rows] >= lo[rows, None]), groups.num_groups)
    mass[row, group] = groups.mass_of(rows[row] * groups.num_groups + group, lo)
    return np.asarray(mass.sum(1, dtype=np.float64))


def _exact_weights(tokens: Floats, top: Floats) -> Floats:
    """exp(token - top) by the same operation as everywhere."""
    weights: Floats = torch.from_numpy(tokens - top).exp_().numpy()
    return weights


def _exact_floor(groups: Groups, lo: Floats, p: NDArray[np.float64], rows: Places) -> Floats:
    """[n] smallest token of each nucleus, as the stage finds it."""
    aim = p[rows] * _exact_mass(groups, lo, rows)
    floor, left = np.full(len(rows), -np.inf, np.float32), np.arange(len(rows))
    for count in _tiers(groups):
        each = rows[left]
        values = groups.falling(each, np.full(len(left), count)).padded()
        weights = _exact_weights(values, groups.top[each, None]) * (values >= lo[each, None])
        reached = weights.cumsum(1, dtype=np.float64)
        floor[left] = values[np.arange(len(left)), (reached[:, :-1] < aim[left, None]).sum(1)]
        left = left[reached[:, -1] < aim[left]]
        if not len(left):
            break
    return floor


def _tiers(groups: Groups) -> list[int]:
    """How many of the best tokens to look at, one after the other: peaked rows stop at the first, others are sorted."""
    size = groups.num_groups * 128
    return [count for count in (32, groups.num_groups // 2, size // 12) if count < size // 2] + [size]
