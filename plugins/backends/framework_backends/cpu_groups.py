"""Rows of logits in groups of 128 ids, as the host's sampler reads them: the best of every group, the rest on demand.

The best tokens of groups say which few groups anything else has to look at: a pass over a vocabulary is made once. On a
host shapes may follow from values, and arrays as small as one number a group are numpy's. Floats are those of
`framework.sampling.groups`, made by the same torch operations in the same order. `cpu_sampler_ops` calls in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.nn import functional

from framework.sampling.groups import BLOCK, GROUP

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float32]
    Places = NDArray[np.int64]

ROUGH_TOP = 64.0
"""How far from 0 the best token of a row may be whose rough mass is used."""
_LOG2_E = 1.4426950408889634
_BLOCK = 8 * BLOCK
"""Most logits that are looked at together, 8 MB of float32: in smaller blocks what operations cost beside their values
is more than a nearer cache saves."""
_STEPS, _NUM_STEPS = 4, 128
"""Steps of a distance of 1 between a group's best token and its row's, and how many are told apart."""
_SAMPLE = 16
"""One id of so many is looked at in order to guess a value that about so many tokens reach."""


class Falling:
    """Tokens of rows [n] in falling order, row behind row: `place` in `rows` and token of each; all that reach bound
    [n] of their row, count [n] of each."""

    def __init__(self, rows: Places, bound: Floats, place: Places, tokens: Floats) -> None:
        self.rows, self.bound, self.place, self.tokens = rows, bound, place, tokens
        self.count = np.bincount(place, minlength=len(rows))
        self.start = np.cumsum(self.count) - self.count

    def at(self, index: Places) -> Floats:
        """[n] token at the index of each row, its last one behind its end; -inf of a row without."""
        if not len(self.tokens):
            return np.full(len(self.rows), -np.inf, np.float32)
        at = self.start + np.minimum(index, self.count - 1)
        return np.where(self.count > 0, self.tokens[at], np.float32(-np.inf))

    def of(self, place: int) -> Floats:
        """[m] tokens of one row."""
        return self.tokens[self.start[place] : self.start[place] + self.count[place]]

    def padded(self) -> Floats:
        """[n, m] tokens, completed with -inf."""
        padded: Floats = _listed(len(self.rows), self.place, self.tokens, -np.inf)
        return padded


class Groups:
    """Rows of logits [L, V] of any float dtype, each times its factor (a positive float32 [L], None for 1).

    A flat place is row * num_groups + group; tokens are float32. Ids behind the vocabulary hold -inf.
    best  [L, num_groups] float32 largest of each group; top [L] of each row; NaN where there is one
    mass  [L, num_groups] float32 sums of exp(token - top), None unless asked for by `with_mass`. A "rough" one is of
          exp(token), NaN for rows whose best is above ROUGH_TOP or below -ROUGH_TOP, within `rough_error` of what it
          should be, and not the same to the last bit among other rows; it takes a third of the time
    """

    def __init__(
        self, logits: Tensor, factor: Floats | None = None, *, with_mass: Literal["exact", "rough"] | None = None
    ) -> None:
        missing = -logits.shape[1] % GROUP
        if missing:
            logits = functional.pad(logits, (0, missing), value=-torch.inf)
        self.num_rows, self.num_groups = len(logits), logits.shape[1] // GROUP
        self._tokens, self._factor = logits.reshape(-1, GROUP), factor
        self._last: Falling | None = None
        self._is_rough = with_mass == "rough"
        best, top = torch.empty(self.num_rows, self.num_groups), torch.empty(self.num_rows, 1)
        mass = torch.empty_like(best) if with_mass else None
        for rows in self._row_blocks():
            self._measure(rows, best[rows], top[rows], None if mass is None else mass[rows])
        self.best: Floats = best.numpy()
        self.mass: Floats | None = None if mass is None else mass.numpy()
        self.top: Floats = top.view(-1).numpy()
        if self.mass is not None and self._is_rough:
            self.mass[~(np.abs(self.top) <= ROUGH_TOP)] = np.nan

    def _row_blocks(self) -> Iterator[slice]:
        step = max(1, _BLOCK // (self.num_groups * GROUP))
        return (slice(at, min(at + step, self.num_rows)) for at in range(0, self.num_rows, step))

    def _measure(self, rows: slice, best: Tensor, top: Tensor, mass: Tensor | None) -> None:
        tokens = self._tokens[rows.start * self.num_groups : rows.stop * self.num_groups]
        factor = None if self._factor is None else torch.from_numpy(self._factor[rows]).unsqueeze(1)
        is_own = mass is not None and tokens.dtype != torch.float32
        tokens = tokens.float()
        torch.amax(tokens, -1, out=best.view(-1))
        if factor is not None:
            best.mul_(factor)  # of a positive factor, the largest product is that of the largest
        torch.amax(best, 1, keepdim=True, out=top)
        if mass is not None:
            weights = tokens.view(len(best), -1) if is_own else tokens.view(len(best), -1).clone()
            self._weigh(weights, factor, top)
            torch.sum(weights.view(-1, GROUP), -1, out=mass.view(-1))

    def _weigh(self, tokens: Tensor, factor: Tensor | None, top: Tensor) -> None:
        """exp(token - top) of tokens without their factor, in place; a rough one is exp(token)."""
        if self._is_rough:
            tokens.mul_(_LOG2_E if factor is None else factor * _LOG2_E).exp2_()
            return
        if factor is not None:
            tokens.mul_(factor)
        tokens.sub_(top).exp_()

    def tokens(self, flat: Places) -> Tensor:
        """[n, 128] tokens of the groups at flat places; nobody else's memory."""
        tokens = self._tokens.index_select(0, torch.from_numpy(flat)).float()
        if self._factor is not None:
            tokens.mul_(torch.from_numpy(self._factor[flat // self.num_groups]).unsqueeze(1))
        return tokens

    def value(self, ids: Places) -> Floats:
        """[L] token of each row's id."""
        place = torch.from_numpy(np.arange(self.num_rows) * (self.num_groups * GROUP) + ids)
        value: Floats = self._tokens.view(-1).index_select(0, place).float().numpy()
        return value if self._factor is None else value * self._factor

    def best_ids(self) -> Places:
        """[L] id of each row's best token, the lowest on ties; some id in range where there is NaN."""
        group = self.best.argmax(1)
        tokens = self.tokens(np.arange(self.num_rows) * self.num_groups + group).numpy()
        ids: Places = group * GROUP + tokens.argmax(1)
        return ids

    def first_ids(self, k: int) -> tuple[Places, Floats]:
        """([L, k] ids of the best tokens, the lowest id first among equals, those tokens). Of a row with NaN they mean
        nothing, and ids stay in range."""
        rows, bound = np.arange(self.num_rows), np.full(self.num_rows, -np.inf, np.float32)
        if k <= self.num_groups:
            bound = np.sort(self.best, axis=1)[:, max(0, self.num_groups - max(k, 1))]
        place, ids, tokens = self.reaching(rows, bound)
        ids, tokens = _listed(self.num_rows, place, ids, 0, k), _listed(self.num_rows, place, -tokens, np.inf, k)
        order = tokens.argsort(1, kind="stable")[:, :k]  # ids rise: among equals, those behind the vocabulary are last
        return np.take_along_axis(ids, order, 1), -np.take_along_axis(tokens, order, 1)

    def mass_of(self, flat: Places, lo: Floats | None) -> Floats:
        """[n] float32 sums of exp(token - top) over the tokens at flat places that are at least lo [L] of their row."""
        mass = torch.empty(len(flat))
        for at in range(0, len(flat), BLOCK // GROUP):
            part = flat[at : at + BLOCK // GROUP]
            row, tokens = part // self.num_groups, self.tokens(part)
            weights = (tokens - torch.from_numpy(self.top[row]).unsqueeze(1)).exp_()
            if lo is not None:
                weights.mul_(torch.ge(tokens, torch.from_numpy(lo[row]).unsqueeze(1), out=tokens))
            torch.sum(weights, -1, out=mass[at : at + len(part)])
        return mass.numpy()

    def reaching(self, rows: Places, bound: Floats, *, strictly: bool = False) -> tuple[Places, Places, Floats]:
        """(place in `rows`, id, token) of every token that is at least, or more than, bound [n] of its row; in the
        order of rows and ids."""
        reaches = np.greater if strictly else np.greater_equal
        group = np.flatnonzero(reaches(self.best[rows], bound[:, None]))
        place = group // self.num_groups
        tokens = self.tokens(group + (rows[place] - place) * self.num_groups).numpy()
        found = np.flatnonzero(reaches(tokens, bound[place, None]))
        at = found // GROUP
        return place[at], group[at] % self.num_groups * GROUP + found % GROUP, tokens.reshape(-1)[found]

    def falling(self, rows: Places, count: NDArray[np.int64]) -> Falling:
        """At least count [n] tokens of each row, the best first, if it has so many."""
        bound = self._reached_by(rows, count)
        found = self._from(rows, bound)
        short = np.flatnonzero((found.count < count) & (bound > -np.inf))
        if len(short):
            bound[short] = -np.inf
            found = self._from(rows, bound)
        return found

    def falling_to(self, rows: Places, bound: Floats) -> Falling:
        """All tokens of `rows` that are at least bound [n], the best first; more where more were listed before."""
        last = self._last
        if last is not None and np.array_equal(rows, last.rows) and bool((bound >= last.bound).all()):
            return last
        return self._from(rows, bound)

    def _from(self, rows: Places, bound: Floats) -> Falling:
        place, _, tokens = self.reaching(rows, bound)
        self._last = Falling(rows, bound, place, _sorted(place, tokens))
        return self._last

    def likely_bound(self, rows: Places, share: NDArray[np.float64]) -> Floats:
        """[n] that the tokens which make up share [n] of a row's mass are likely to reach; `mass` must be there.

        The groups whose best tokens reach it have that share: they are counted by the distance from the row's best.
        """
        assert self.mass is not None
        top, mass = self.top[rows, None], self.mass[rows]
        step = np.fmin((top - self.best[rows]) * _STEPS, _NUM_STEPS - 1).astype(np.int64)  # of NaN the last
        step += np.arange(len(rows))[:, None] * _NUM_STEPS
        by_step = np.bincount(step.reshape(-1), mass.reshape(-1), len(rows) * _NUM_STEPS).reshape(len(rows), -1)
        reached = by_step.cumsum(1)
        place = (reached < (share * reached[:, -1])[:, None]).sum(1)
        bound: Floats = top[:, 0] - (place + 1).astype(np.float32) / np.float32(_STEPS)
        bound[place == _NUM_STEPS - 1] = -np.inf
        return bound

    def _reached_by(self, rows: Places, count: NDArray[np.int64]) -> Floats:
        """[n] value that `count` tokens of each row reach: at least so many for a few, about that for more."""
        bound = np.full(len(rows), -np.inf, np.float32)
        few = np.flatnonzero(count * 2 <= self.num_groups)
        if len(few):
            best = np.sort(self.best[rows[few]], axis=1)
            bound[few] = best[np.arange(len(few)), self.num_groups - count[few]]
        rank = count // _SAMPLE * 5 // 4 + 8
        for place in np.flatnonzero((count * 2 > self.num_groups) & (rank * _SAMPLE < self.num_groups * GROUP)):
            sample = np.sort(self._sample(rows[place]))
            bound[place] = sample[len(sample) - rank[place]]
        return bound

    def _sample(self, row: int) -> Floats:
        tokens = self._tokens[row * self.num_groups : (row + 1) * self.num_groups, ::_SAMPLE].float().numpy()
        return tokens.reshape(-1) if self._factor is None else tokens.reshape(-1) * self._factor[row]


def rough_error(top: Floats) -> Floats:
    """Relative error that a rough mass of a row may have; top [n] is the size of its best token.

    A token's power of two has a factor and a product that are rounded, each by 2^-24 of the token, and the token itself
    is. What is far below the best has no share in the sum.
    """
    return (top + np.float32(16)) * np.float32(2e-7)


def _sorted(place: Places, tokens: Floats) -> Floats:
    """Tokens of each place in falling order; place [n] rises. One sort of integers, as those of many rows are few."""
    bits = tokens.view(np.int32)
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = place << 32 | ~rising.astype(np.int64) + 2**31
    keys.sort()
    rising = (~((keys & 0xFFFFFFFF) - 2**31)).astype(np.int32)
    return (rising ^ (rising >> 31 & 0x7FFFFFFF)).view(np.float32)


def _listed(num_rows: int, place: Places, values: NDArray[Any], fill: float, width: int = 1) -> NDArray[Any]:
    """[num_rows, m] values of each place in their order, completed with `fill`. place [n] rises; m >= width."""
    counts = np.bincount(place, minlength=num_rows)
    column = np.arange(len(place)) - (np.cumsum(counts) - counts)[place]
    listed = np.full((num_rows, max(width, int(counts.max(initial=0)))), fill, values.dtype)
    listed[place, column] = values
    return listed
