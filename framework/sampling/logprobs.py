"""Logprobs of what was sampled: what each row asks for, the numbers themselves, and their way to the host.

Computed on the device for the rows that asked, brought to the host at the end of the step. Whether they are of the
model's logits or of the processed ones is the pipeline's affair, which calls; prompts' logprobs are computed here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from framework.batch import LogprobsColumns
from framework.sampling.groups import group_max, largest_ids, log_mass, num_larger, row_blocks
from framework.sent import sent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import LogprobsRow
    from framework.interfaces import SamplerOps
    from framework.request import SamplingParams

NO_ID = -1
"""Stands in place of an id where a row has fewer than its neighbours."""
FEW_IDS = 64
"""Up to so many listed ids a pass over the row for each costs less than one pass that sorts its logits in between."""
FEW_BEST = 64
"""Rows that ask for more of the best tokens are looked at apart: sorting is for those that want it."""


def num_top(asked: int | None, vocab_size: int) -> int:
    """How many best tokens `logprobs` or `prompt_logprobs` asks for: -1 is the whole vocabulary, None is none."""
    if asked is None:
        return 0
    return vocab_size if asked == -1 else asked


class Asked:
    """What each row of the request table asks for, on the host, and the mode in which all are answered.

    mode  `sampler.logprobs_mode`
    ops   of the backend, if it has a way of its own to the numbers
    """

    def __init__(self, mode: str, vocab_size: int, num_rows: int, ops: SamplerOps | None = None) -> None:
        self.is_processed, self.is_log = mode.startswith("processed_"), mode.endswith("_logprobs")
        self._vocab_size, self._ops = vocab_size, ops
        self._num_top = np.zeros(num_rows, np.int32)
        self._listed: dict[int, NDArray[np.int64]] = {}

    def add(self, req_idx: int, params: SamplingParams) -> None:
        """Overwrites the row."""
        self._num_top[req_idx] = num_top(params.logprobs, self._vocab_size)
        self.release(req_idx)
        if params.logprob_token_ids:
            self._listed[req_idx] = np.unique(np.array(params.logprob_token_ids, np.int64))

    def release(self, req_idx: int) -> None:
        """The row is nobody's."""
        self._listed.pop(req_idx, None)

    def measure(self, logits: Tensor, ids: Tensor, rows_np: NDArray[np.int64], req_idx: NDArray[np.int32]) -> Measured:
        """Numbers of the step. logits [n, V] and ids [n] of the logits rows `rows_np`; req_idx [n] their rows."""
        counts = self._num_top[req_idx]
        listing = np.array([place for place, one in enumerate(req_idx.tolist()) if one in self._listed], np.int64)
        if self._ops is not None and len(listing) == 0 and counts.max() <= FEW_BEST:
            told = self._ops.logprobs(logits, ids, int(counts.max()), is_log=self.is_log)
            tops = [Part(rows_np, told.top_ids, told.top_logprobs, told.top_ranks)]
            return Measured(rows_np, told.sampled, told.rank, tops)
        row = _Rows(logits.float(), ids, rows_np, is_log=self.is_log)
        few, many = counts <= FEW_BEST, counts > FEW_BEST
        tops = [row.best(int(counts[part].max()), part.nonzero()[0]) for part in (few, many) if part.any()]
        listed = self._listed_of(row, req_idx, listing) if len(listing) else None
        return Measured(rows_np, *row.sampled(), tops, listed)

    def num_top(self, req_idx: NDArray[np.int32]) -> int | None:
        """The most best tokens that one of the rows asks for; None where they ask for more than the backend's own way
        gives, or list ids."""
        most = int(self._num_top[req_idx].max(initial=0))
        if self._ops is None or most > FEW_BEST or not self._listed.keys().isdisjoint(req_idx.tolist()):
            return None
        return most

    def measure_all(self, logits: Tensor, ids: Tensor, k: int) -> Measured:
        """Numbers of every row [L, V], the k best of each among them, by the backend's own way and for any request."""
        assert self._ops is not None, "the backend has no way of its own"
        rows_np = np.arange(len(ids))
        told = self._ops.logprobs(logits, ids, k, is_log=self.is_log)
        return Measured(
            rows_np, told.sampled, told.rank, [Part(rows_np, told.top_ids, told.top_logprobs, told.top_ranks)]
        )

    def _listed_of(self, row: _Rows, req_idx: NDArray[np.int32], listing: NDArray[np.int64]) -> Part:
        """Ids that the rows at the places `listing` of req_idx list."""
        lists = [self._listed[one] for one in req_idx[listing].tolist()]
        ids_np = np.full((len(lists), max(map(len, lists))), NO_ID, np.int64)
        for padded, ids in zip(ids_np, lists, strict=True):
            padded[: len(ids)] = ids
        return row.listed(ids_np, listing)


@dataclass(slots=True)
class Part:
    """Numbers of m tokens in each of r rows, on the device: ids, logprobs and ranks [r, m]. NO_ID means no token.

    rows_np  [r] their logits rows
    """

    rows_np: NDArray[np.int64]
    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


@dataclass(slots=True)
class Measured:
    """What `LogprobsColumns` are made of, on the device: rows_np [n] are the logits rows that asked.

    sampled, rank [n]  of the sampled token
    best               the best tokens, of all rows together: rows that ask for few stand apart from the others
    listed             tokens that requests list
    """

    rows_np: NDArray[np.int64]
    sampled: Tensor
    rank: Tensor
    best: list[Part]
    listed: Part | None = None

    def at(self, rows_np: NDArray[np.int64], k: int) -> Measured:
        """Numbers of some of the rows, of numbers of every row, with the k best of each."""
        (all_rows,) = self.best
        n, index = len(rows_np), torch.from_numpy(rows_np)
        are_first = n > 0 and rows_np[-1] == n - 1
        numbers = self.sampled, self.rank, all_rows.ids, all_rows.logprobs, all_rows.ranks
        # copies both ways: the numbers may lie where a later step puts its own
        sampled, rank, *best = (one[:n].clone() if are_first else one.index_select(0, index) for one in numbers)
        return Measured(rows_np, sampled, rank, [Part(rows_np, *(one[:, :k] for one in best))])


def measure(logits: Tensor, ids: Tensor, k: int, *, is_log: bool) -> Measured:
    """Numbers of the given and of the k best tokens of rows that all ask for the same. logits [n, V], ids [n] int64."""
    rows_np = np.arange(len(ids))
    row = _Rows(logits.float(), ids, rows_np, is_log=is_log)
    return Measured(rows_np, *row.sampled(), [row.best(k, rows_np)])


class _Rows:
    """Rows of logits and what makes logprobs of them: log-softmax in float32, or nothing unless `is_log`.

    logits [n, V] float32; ids [n] int64; rank = 1 + number of strictly larger logits. A masked token has -inf, of which
    no sum makes NaN.
    """

    def __init__(self, logits: Tensor, ids: Tensor, rows_np: NDArray[np.int64], *, is_log: bool) -> None:
        self._logits, self._ids, self._rows_np = logits, ids.unsqueeze(1), rows_np
        self._off = torch.zeros(len(logits), 2, device=logits.device)
        if is_log:
            top = group_max(logits).amax(-1, keepdim=True)
            self._off = torch.cat([top, log_mass(logits, top)], 1)

    def sampled(self) -> tuple[Tensor, Tensor]:
        """(logprobs [n], ranks [n] int32) of the ids."""
        value = self._logits.gather(1, self._ids)
        return _less(value, self._off).squeeze(1), num_larger(self._logits, value) + 1

    def best(self, k: int, places: NDArray[np.int64]) -> Part:
        """The k best tokens of the rows at `places`, in falling order, the lowest id first among equals."""
        logits, off = self._at(places)
        ids = largest_ids(logits, k)
        values = logits.gather(1, ids)
        return Part(self._rows_np[places], ids, _less(values, off), _ranks(values))

    def listed(self, ids_np: NDArray[np.int64], places: NDArray[np.int64]) -> Part:
        """Tokens ids_np [r, m] of the rows at `places`."""
        logits, off = self._at(places)
        ids = sent(ids_np, logits.device)
        values = logits.gather(1, ids.clamp(min=0))
        return Part(self._rows_np[places], ids, _less(values, off), num_larger_each(logits, values) + 1)

    def _at(self, places: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        if len(places) == len(self._logits):
            return self._logits, self._off
        index = sent(places, self._logits.device)
        return self._logits.index_select(0, index), self._off.index_select(0, index)


def _less(values: Tensor, off: Tensor) -> Tensor:
    """[n, k] values less both of off [n, 2], the larger one first: together they would be rounded to its last place."""
    return values - off[:, :1] - off[:, 1:]


def _ranks(falling: Tensor) -> Tensor:
    """[n, k] int32 of values in falling order, the best of the row first: 1 + the place of the first equal one."""
    places = torch.arange(1, falling.shape[1] + 1, dtype=torch.int32, device=falling.device).expand_as(falling)
    if falling.shape[1] < 2:
        return places
    same = functional.pad(falling[:, 1:] == falling[:, :-1], (1, 0))
    return places.masked_fill(same, 0).cummax(1).values


def num_larger_each(logits: Tensor, values: Tensor) -> Tensor:
    """[n, m] int32 how many logits of each row [n, V] exceed each of its values [n, m]."""
    if values.shape[1] <= FEW_IDS:
        return torch.stack([num_larger(logits, column) for column in values.split(1, dim=1)], 1)
    return torch.cat([_num_larger_sorted(logits[rows], values[rows]) for rows in row_blocks(logits)])


def _num_larger_sorted(logits: Tensor, values: Tensor) -> Tensor:
    """`num_larger_each` by sorting each row's values: a logit exceeds those that stand before its own place."""
    rising, order = values.sort(1)
    places = torch.searchsorted(rising, logits)
    counts = torch.zeros((len(values), values.shape[1] + 1), dtype=torch.int32, device=values.device)
    counts.scatter_add_(1, places, counts.new_ones(1).expand_as(places))
    at_least = counts.flip(1).cumsum(1, dtype=torch.int32).flip(1)
    return torch.empty_like(counts[:, 1:]).scatter_(1, order, at_least[:, 1:])


def to_host(device: Measured, num_rows: int) -> LogprobsColumns:
    """Columns of all logits rows of the step; rows that did not ask hold NaN, rank 0 and ids -1. Waits."""
    if len(device.rows_np) == num_rows and len(device.best) == 1 and device.listed is None:
        return _whole_to_host(device)
    k = max(part.ids.shape[1] for part in device.best)
    columns = LogprobsColumns(
        sampled=np.full(num_rows, np.nan, np.float32),
        rank=np.zeros(num_rows, np.int32),
        top_ids=np.full((num_rows, k), NO_ID, np.int32),
        top_logprobs=np.full((num_rows, k), np.nan, np.float32),
        top_ranks=np.zeros((num_rows, k), np.int32),
    )
    columns.sampled[device.rows_np] = device.sampled.cpu().numpy()
    columns.rank[device.rows_np] = device.rank.cpu().numpy()
    for part in device.best:
        ids, logprobs, ranks = _part_to_host(part)
        columns.top_ids[part.rows_np, : ids.shape[1]] = ids
        columns.top_logprobs[part.rows_np, : ids.shape[1]] = logprobs
        columns.top_ranks[part.rows_np, : ids.shape[1]] = ranks
    if device.listed is not None:
        for row, *told in zip(device.listed.rows_np.tolist(), *_part_to_host(device.listed), strict=True):
            count = int((told[0] != NO_ID).sum())
            columns.listed[row] = (told[0][:count], told[1][:count], told[2][:count])
    return columns


def _whole_to_host(device: Measured) -> LogprobsColumns:
    """Columns of rows that all asked, and for a like number: copies, since the memory may be the next step's."""
    ids, logprobs, ranks = _part_to_host(device.best[0])
    return LogprobsColumns(
        sampled=np.array(device.sampled.cpu().numpy(), np.float32),
        rank=np.array(device.rank.cpu().numpy(), np.int32),
        top_ids=ids,
        top_logprobs=np.array(logprobs, np.float32),
        top_ranks=np.array(ranks, np.int32),
    )


def _part_to_host(part: Part) -> LogprobsRow:
    return part.ids.cpu().numpy().astype(np.int32), part.logprobs.cpu().numpy(), part.ranks.cpu().numpy()
