"""Moments of the distribution inside an interval of logits: its mass, its entropy, the best token.

Sums are taken by the groups of `framework.sampling.groups`, so that a row gives the same bits in any batch. Called by
the stages of this package that measure how surprising a token is: its surprise is -ln p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from framework.sampling.groups import grouped, row_blocks
from framework.sampling.interval import at_most, drop_below, is_open

NO_MASS = -110.0  # e to this power is 0 in float32


@dataclass(frozen=True, slots=True)
class Moments:
    """Of each row of logits inside an interval; NaN for a row without a finite largest logit.

    top      [L] float32 largest logit
    log_sum  [L] float64 ln of the sum of exp(logit - top); ln p of a token is logit - top - log_sum
    entropy  [L] float64 nats: the mean surprise
    """

    top: Tensor
    log_sum: Tensor
    entropy: Tensor


def moments(logits: Tensor, lo: Tensor, hi: Tensor) -> Moments:
    """Moments of float32 logits [L, V] inside [lo, hi], both [L]."""
    parts = [_block(logits[rows], part_of(lo, rows), part_of(hi, rows)) for rows in row_blocks(logits)]
    top, mass, inner = (torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True))
    log_sum = mass.log()
    return Moments(top, log_sum, log_sum - inner / mass)


def part_of(bound: Tensor, rows: slice) -> Tensor:
    """A side of an interval for some of the rows; one that is open stays marked so."""
    return bound if is_open(bound) else bound[rows]


def _block(logits: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(best logit, sum of weights, sum of weight * ln weight) of each row, the sums in float64."""
    kept = at_most(logits, hi)
    top = kept.amax(-1)
    shifted = (kept - top.unsqueeze(1)).clamp_(min=NO_MASS)
    weights = drop_below(shifted.exp(), logits, lo)
    mass = grouped(weights, 0.0).sum(-1).sum(-1, dtype=torch.float64)
    inner = grouped(weights.mul_(shifted), 0.0).sum(-1).sum(-1, dtype=torch.float64)
    return top, mass, inner
