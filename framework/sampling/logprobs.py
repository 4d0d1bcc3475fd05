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
from framework.sampling.groups import group_max, largest_ids, log_sum_exp, num_larger, row_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import LogprobsRow
    from framework.request import SamplingParams

FEW_IDS = 64
"""Up to so many listed ids a pass over the row for each costs less than one pass that sorts its logits in between."""


def num_top(asked: int | None, vocab_size: int) -> int:
    """How many best tokens `logprobs` or `prompt_logprobs` asks for: -1 is the whole vocabulary, None is none."""
    if asked is None:
        return 0
    return vocab_size if asked == -1 else asked


class Asked:
    """What each row of the request table asks for, on the host, and the mode in which all are answered.

    mode  `sampler.logprobs_mode`
    """

    def __init__(self, mode: str, vocab_size: int, num_rows: int) -> None:
        self.is_processed, self.is_log = mode.startswith("processed_"), mode.endswith("_logprobs")
        self._vocab_size = vocab_size
        self._num_top = np.zeros(num_rows, np.int32)
        self._listed: dict[int, NDArray[np.int64]] = {}

    def add(self, req_idx: int, params: SamplingParams) -> None:
        """Overwrites the row."""
        self._num_top[req_idx] = num_top(params.logprobs, self._vocab_size)
        self._listed.pop(req_idx, None)
        if params.logprob_token_ids:
            self._listed[req_idx] = np.unique(np.array(params.logprob_token_ids, np.int64))

    def measure(self, logits: Tensor, ids: Tensor, wanting: NDArray[np.int64], req_idx: NDArray[np.int32]) -> Measured:
        """Columns of the step. logits [n, V] and ids [n] of the logits rows `wanting`; req_idx [n] their rows."""
        logits = logits.float()
        k = int(self._num_top[req_idx].max())
        measured = measure(logits, ids, k, wanting, is_log=self.is_log)
        if self._listed:
            self._add_listed(measured, logits, req_idx)
        return measured

    def _add_listed(self, measured: Measured, logits: Tensor, req_idx: NDArray[np.int32]) -> None:
        listing = [place for place, row in enumerate(req_idx.tolist()) if row in self._listed]
        if not listing:
            return
        lists = [self._listed[row] for row in req_idx[listing].tolist()]
        ids_np = np.full((len(lists), max(map(len, lists))), -1, np.int64)
        for row, ids in zip(ids_np, lists, strict=True):
            row[: len(ids)] = ids
        total = measured.total
        if len(listing) < len(logits):
            index = torch.tensor(listing, device=logits.device)
            logits, total = logits.index_select(0, index), total.index_select(0, index)
        values = logits.gather(1, torch.from_numpy(ids_np).to(logits.device).clamp(min=0))
        rows_np = measured.rows_np[listing]
        measured.listed = Listed(rows_np, ids_np, values - total, num_larger_each(logits, values) + 1)


@dataclass(slots=True)
class Listed:
    """Numbers of the m ids that rows list: ids_np [r, m] -1 behind a row's last, logprobs and ranks on the device."""

    rows_np: NDArray[np.int64]
    ids_np: NDArray[np.int64]
    logprobs: Tensor
    ranks: Tensor


@dataclass(slots=True)
class Measured:
    """Columns of `LogprobsColumns` on the device, for the n rows that asked; rows_np [n] are their logits rows.

    total [n, 1] what makes logprobs of logits when it is taken off them: 0 in the modes that tell logits
    """

    rows_np: NDArray[np.int64]
    total: Tensor
    sampled: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    top_ranks: Tensor
    listed: Listed | None = None


def measure(logits: Tensor, ids: Tensor, k: int, rows_np: NDArray[np.int64], *, is_log: bool) -> Measured:
    """Log-softmax, or the logit itself unless `is_log`, and rank of the given and of the k best tokens of each row.

    logits [n, V] float32; ids [n] int64. The k best stand in falling order, the lowest id first among equals;
    rank = 1 + number of strictly larger logits. A masked token has -inf, which no sum makes NaN of.
    """
    value = logits.gather(1, ids.unsqueeze(1))
    total = log_sum_exp(logits, group_max(logits).amax(-1, keepdim=True)) if is_log else torch.zeros_like(value)
    top_ids = largest_ids(logits, k)
    top = logits.gather(1, top_ids)
    return Measured(
        rows_np=rows_np,
        total=total,
        sampled=(value - total).squeeze(1),
        rank=num_larger(logits, value) + 1,
        top_ids=top_ids,
        top_logprobs=top - total,
        top_ranks=_ranks(top),
    )


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
    k = device.top_ids.shape[1]
    columns = LogprobsColumns(
        sampled=np.full(num_rows, np.nan, np.float32),
        rank=np.zeros(num_rows, np.int32),
        top_ids=np.full((num_rows, k), -1, np.int32),
        top_logprobs=np.full((num_rows, k), np.nan, np.float32),
        top_ranks=np.zeros((num_rows, k), np.int32),
        listed={} if device.listed is None else _listed_to_host(device.listed),
    )
    columns.sampled[device.rows_np] = device.sampled.cpu().numpy()
    columns.rank[device.rows_np] = device.rank.cpu().numpy()
    columns.top_ids[device.rows_np] = device.top_ids.cpu().numpy()
    columns.top_logprobs[device.rows_np] = device.top_logprobs.cpu().numpy()
    columns.top_ranks[device.rows_np] = device.top_ranks.cpu().numpy()
    return columns


def _listed_to_host(device: Listed) -> dict[int, LogprobsRow]:
    logprobs, ranks = device.logprobs.cpu().numpy(), device.ranks.cpu().numpy()
    counts = (device.ids_np >= 0).sum(1).tolist()
    ids = device.ids_np.astype(np.int32)
    return {
        row: (ids[at, :count], logprobs[at, :count], ranks[at, :count])
        for at, (row, count) in enumerate(zip(device.rows_np.tolist(), counts, strict=True))
    }
