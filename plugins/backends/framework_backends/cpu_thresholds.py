"""Lower bounds of min-p, top-k and top-p on the host, equal to those of the stages with these names.

Functions of `Groups`; bounds are float32 [L] arrays, -inf for none, and only tokens at or above the bound so far count.
`cpu_sampler_ops` calls them in the order of the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework_backends.cpu_groups import Groups

    Floats = NDArray[np.float32]


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
    target = np.zeros(len(lo))
    target[left] = p[left].astype(np.float64) * _total(groups, lo, left)
    floor = np.full_like(lo, -np.inf)
    for count in _tiers(groups):
        values = groups.falling(left, np.full(len(left), count))
        floor[left], is_settled = _nucleus(values, groups.top[left], lo[left], target[left])
        left = left[~is_settled]
        if not len(left):
            break
    return np.maximum(lo, floor)


def _tiers(groups: Groups) -> list[int]:
    """How many of the best tokens to look at, one after the other: peaked rows stop at the first, others are sorted."""
    size = groups.num_groups * 128
    return [count for count in (32, groups.num_groups // 2, size // 12) if count < size // 2] + [size]


def _total(groups: Groups, lo: Floats, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """[n] mass of the tokens of `rows` that are at least lo, relative to the best: of all when that was measured."""
    mass = groups.mass
    if mass is None:
        mass = np.zeros_like(groups.best)
        is_kept = np.zeros_like(mass, dtype=bool)
        is_kept[rows] = groups.best[rows] >= lo[rows, None]
        flat = np.flatnonzero(is_kept)
        mass.reshape(-1)[flat] = groups.mass_of(flat, lo)
    return np.asarray(mass[rows].sum(1, dtype=np.float64))


def _nucleus(values: Floats, top: Floats, lo: Floats, target: NDArray[np.float64]) -> tuple[Floats, NDArray[np.bool_]]:
    """(smallest token of each nucleus [n], whether it ends among the values [n]). values [n, m] fall."""
    weights = torch.from_numpy(values - top[:, None]).exp_().numpy()
    weights *= values >= lo[:, None]
    mass = weights.cumsum(1, dtype=np.float64)
    num_before = (mass[:, :-1] < target[:, None]).sum(1)
    return values[np.arange(len(values)), num_before], mass[:, -1] >= target
