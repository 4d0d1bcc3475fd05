"""Probability mass of rows of logits, group by group: what the draw, top_p and logprobs sum.

Rows are taken a few at a time, so that what is in between stays in a cache and is never a new block of memory as large
as the logits: on a CPU the page faults of such a block cost several times the arithmetic. Rows never mix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from framework.sampling.groups import grouped
from framework.sampling.interval import drop_below, is_open

BLOCK = 2**18
"""Most logits at a time, unless one row has more: 1 MB of float32."""


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of [L, V] that hold about BLOCK logits each."""
    step = max(1, BLOCK // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def kept_mass(logits: Tensor, top: Tensor, lo: Tensor | None = None) -> Tensor:
    """[L, G] float32 sums of exp(logit - top) over the tokens of each group that are at least lo.

    top [L, 1] is the largest logit of each row; lo [L], None for no bound.
    """
    bound = None if lo is None or is_open(lo) else lo
    parts = [
        _block_mass(logits[rows], top[rows], None if bound is None else bound[rows]) for rows in row_blocks(logits)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _block_mass(logits: Tensor, top: Tensor, lo: Tensor | None) -> Tensor:
    weights = (logits - top).exp_()
    if lo is not None:
        drop_below(weights, logits, lo)
    return grouped(weights, 0.0).sum(-1)


def log_sum_exp(logits: Tensor, top: Tensor) -> Tensor:
    """[L, 1] log of the sum of exp(logits) of float32 rows. top [L, 1] is the largest logit of each row."""
    return kept_mass(logits, top).sum(-1, keepdim=True).log_().add_(top)


def num_larger(logits: Tensor, value: Tensor) -> Tensor:
    """[L] int32 how many logits of each row exceed value [L, 1].

    Counted in float32, exact below 2^24 and several times quicker than a sum of bools on a CPU.
    """
    parts = []
    for rows in row_blocks(logits):
        larger = torch.empty_like(logits[rows])
        torch.gt(logits[rows], value[rows], out=larger)
        parts.append(larger.sum(-1))
    return torch.cat(parts).int()
