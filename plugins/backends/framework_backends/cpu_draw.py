"""The two-level keyed draw on the host: the tokens that `framework.sampling.draw` draws, with a look at few groups.

A group's score lies between that of its best token alone and that of 128 such tokens. Only groups that may win by this
are summed up, which spares nearly all exponentials of a row. A function of `Groups`, called by `cpu_sampler_ops`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from framework.rng import TARGET, gumbel_np, random_bits, row_keys_np
from framework.sampling.groups import GROUP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework_backends.cpu_groups import Groups

    Floats = NDArray[np.float32]
    Places = NDArray[np.int64]
    Key = tuple[NDArray[np.uint32], NDArray[np.uint32]]

_REACH = np.float32(math.log(GROUP) + 0.01)
"""How far a group's score may lie above that of its best token alone, with room for the rounding of both."""


def draw(groups: Groups, rows: Places, lo: Floats | None, seed: Places, position: Places) -> Places:
    """[n] ids drawn for `rows` [n] of the groups; the lowest id on ties.

    lo              [L] float32, None for no bound
    seed, position  [L] int64, as `framework.sampling.draw.draw` takes them
    A row without a finite largest token gives some id in range.
    """
    keys = row_keys_np(seed[rows], position[rows], TARGET)[..., None]
    group = _draw_group(groups, rows, lo, (keys[0, 0], keys[0, 1]))
    return _draw_token(groups, rows, lo, group, (keys[1, 0], keys[1, 1]))


def _draw_group(groups: Groups, rows: Places, lo: Floats | None, key: Key) -> Places:
    """[n] group of each row."""
    least, noise = _least_scores(groups, rows, lo, key)
    place = np.flatnonzero(least >= least.max(1, keepdims=True) - _REACH)
    row, group = np.divmod(place, groups.num_groups)
    mass = torch.from_numpy(groups.mass_of(rows[row] * groups.num_groups + group, lo))
    scores = np.full_like(least, -np.inf)
    scores[row, group] = mass.log_().numpy() + noise[row, group]
    found: Places = scores.argmax(1)
    return found


def _least_scores(groups: Groups, rows: Places, lo: Floats | None, key: Key) -> tuple[Floats, Floats]:
    """([n, G] scores of the best tokens alone, -inf without a kept one, the noise in them)."""
    best, group = groups.best[rows], np.arange(groups.num_groups, dtype=np.uint32)
    least = best - groups.top[rows, None]
    if lo is None:
        noise = gumbel_np(random_bits(key, group))
        return np.add(least, noise, out=least), noise
    row, kept = np.divmod(np.flatnonzero(best >= lo[rows, None]), groups.num_groups)
    noise = np.full_like(least, -np.inf)
    noise[row, kept] = gumbel_np(random_bits((key[0][row, 0], key[1][row, 0]), group[kept]))
    return np.add(least, noise, out=least), noise


def _draw_token(groups: Groups, rows: Places, lo: Floats | None, group: Places, key: Key) -> Places:
    """[n] token of each row's group."""
    ids = (group * GROUP)[:, None] + np.arange(GROUP)
    tokens = groups.tokens(rows * groups.num_groups + group).numpy()
    scores = tokens - groups.top[rows, None]
    if lo is not None:
        scores[tokens < lo[rows, None]] = -np.inf
    scores += gumbel_np(random_bits(key, ids.astype(np.uint32)))
    found: Places = ids[np.arange(len(ids)), scores.argmax(1)]
    return found
