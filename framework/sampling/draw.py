"""The two-level keyed draw: Gumbel-max over groups of 128 ids, then over the tokens of the group that won.

Exact in law, one noise number a group instead of one a token, and a function of (seed, position, logits of the row)
alone. This is the reference that every device's draw agrees with; the select stage `gumbel` calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from framework.rng import TARGET, gumbel, random_bits, row_keys
from framework.sampling.groups import GROUP, kept_mass
from framework.sampling.interval import at_most, is_open


def draw(logits: Tensor, seed: Tensor, position: Tensor, lo: Tensor, hi: Tensor, stream: int = TARGET) -> Tensor:
    """[L] int64 ids drawn from the softmax of the kept logits; the lowest id on ties.

    logits    [L, V] float32
    seed      [L] int64 bits of each row's 64-bit seed; position [L] int64 index of the token that is drawn
    lo, hi    [L] float32 the kept interval
    A row without a finite largest logit gives some id in range: the pipeline reports such a row as bad.
    Source: Gumbel-max is closed under grouping, as the maximum of a group's scores is its log-sum-exp plus one Gumbel.
    """
    logits = at_most(logits, hi)
    top = logits.amax(-1, keepdim=True)
    keys = row_keys(seed, position, stream).unsqueeze(-1)
    group = _draw_group(logits, top, lo, (keys[0, 0], keys[0, 1]))
    return _draw_token(logits, top, lo, group, (keys[1, 0], keys[1, 1]))


def _draw_group(logits: Tensor, top: Tensor, lo: Tensor, key: tuple[Tensor, Tensor]) -> Tensor:
    """[L, 1] group of each row; one without a kept token has log-sum-exp -inf and cannot win."""
    scores = kept_mass(logits, top, lo).log_()
    ids = torch.arange(scores.shape[1], device=logits.device)
    return scores.add_(gumbel(random_bits(key, ids))).argmax(-1, keepdim=True)


def _draw_token(logits: Tensor, top: Tensor, lo: Tensor, group: Tensor, key: tuple[Tensor, Tensor]) -> Tensor:
    """[L] token of each row's group."""
    ids = group * GROUP + torch.arange(GROUP, device=logits.device)
    last = logits.shape[1] - 1
    tokens = logits.gather(1, ids.clamp(max=last))
    kept = ids <= last if is_open(lo) else (ids <= last) & (tokens >= lo.unsqueeze(1))
    # Relative to the row's best: a low temperature scales logits up to where float32 would swallow the noise.
    scores = torch.where(kept, tokens - top, float("-inf")).add_(gumbel(random_bits(key, ids)))
    return ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
