"""Logprobs of what was sampled: of the model's own logits, whatever the pipeline did with them.

Computed on the device for the rows that asked, brought to the host at the end of the step. Called by the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from framework.batch import LogprobsColumns
from framework.sampling.groups import group_max, largest_ids, log_sum_exp, num_larger

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

NOT_ASKED = -1


def num_top(asked: int | None, vocab_size: int) -> int:
    """How many best tokens a request's `logprobs` asks for: -1 is the whole vocabulary. NOT_ASKED for None."""
    if asked is None:
        return NOT_ASKED
    return vocab_size if asked == -1 else asked


@dataclass(slots=True)
class DeviceLogprobs:
    """Columns of `LogprobsColumns` on the device, for the n rows that asked; rows_np [n] are their logits rows."""

    rows_np: NDArray[np.int64]
    sampled: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    top_ranks: Tensor


def raw_logprobs(raw: Tensor, ids: Tensor, k: int, rows_np: NDArray[np.int64]) -> DeviceLogprobs:
    """Log-softmax, in float32, and rank of the sampled and of the k best tokens.

    raw [n, V] the model's logits in any dtype; ids [n] int64. The k best stand in falling order, the lowest id first
    among equals; rank = 1 + number of strictly larger logits.
    """
    logits = raw.float()
    total = log_sum_exp(logits, group_max(logits).amax(-1, keepdim=True))
    value = logits.gather(1, ids.unsqueeze(1))
    top_ids = largest_ids(logits, k)
    top = logits.gather(1, top_ids)
    return DeviceLogprobs(
        rows_np=rows_np,
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


def to_host(device: DeviceLogprobs, num_rows: int) -> LogprobsColumns:
    """Columns of all logits rows of the step; rows that did not ask hold NaN, rank 0 and ids -1."""
    k = device.top_ids.shape[1]
    columns = LogprobsColumns(
        sampled=np.full(num_rows, np.nan, np.float32),
        rank=np.zeros(num_rows, np.int32),
        top_ids=np.full((num_rows, k), -1, np.int32),
        top_logprobs=np.full((num_rows, k), np.nan, np.float32),
        top_ranks=np.zeros((num_rows, k), np.int32),
    )
    columns.sampled[device.rows_np] = device.sampled.cpu().numpy()
    columns.rank[device.rows_np] = device.rank.cpu().numpy()
    columns.top_ids[device.rows_np] = device.top_ids.cpu().numpy()
    columns.top_logprobs[device.rows_np] = device.top_logprobs.cpu().numpy()
    columns.top_ranks[device.rows_np] = device.top_ranks.cpu().numpy()
    return columns
