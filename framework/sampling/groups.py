"""Reductions of rows of logits by fixed groups of 128 ids: best tokens, largest values, probability mass.

The group is the unit of the draw. It also makes a row's result depend on that row alone: a sum over one long row would
be split between threads when the row stands alone, and rounded otherwise. Used by the draw, logprobs and stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from framework.sampling.interval import drop_below, is_open

GROUP = 128
"""Ids in a group. Part of the draw's written contract: another size draws other tokens for the same seed."""

BLOCK = 2**18
"""Most logits that a sum works on at a time, unless one row has more: 1 MB of float32.

What is in between stays in a cache and is never a new block of memory as large as the logits: on a CPU the page faults
of such a block cost several times the arithmetic.
"""


_FEW_ROWS = 4
"""Up to so many rows one slow pass costs less than a dozen operations with cold caches: 88 us against 225 for one."""


def grouped(rows: Tensor, fill: float) -> Tensor:
    """[L, V] -> [L, G, 128]: a view when V is a multiple of 128, else a copy completed with `fill`."""
    missing = -rows.shape[1] % GROUP
    if missing:
        rows = functional.pad(rows, (0, missing), value=fill)
    return rows.unflatten(1, (-1, GROUP))


def group_max(logits: Tensor) -> Tensor:
    """[L, V] -> [L, G] largest logit of each group."""
    return grouped(logits, float("-inf")).amax(-1)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(largest logit [L], its lowest id [L] int64) of [L, V]. A row that holds NaN gives NaN and some id in range."""
    if len(logits) <= _FEW_ROWS:
        top, ids = logits.max(1)  # documented to give the first of equal values
        return top, ids
    tops = group_max(logits)
    group = tops.argmax(-1, keepdim=True)  # the first of equal groups holds the lowest id
    ids = group * GROUP + torch.arange(GROUP, device=logits.device)
    last = logits.shape[1] - 1
    tokens = logits.gather(1, ids.clamp(max=last))  # repeats of the last id stand after it and cannot win a tie
    place = tokens.argmax(-1, keepdim=True)
    return tops.gather(1, group).squeeze(1), (ids.gather(1, place)).clamp_(max=last).squeeze(1)


def largest(logits: Tensor, k: int) -> Tensor:
    """[L, k] the k largest logits of each row in falling order, repeats included.

    They stand in the k groups of the largest maxima, so that a small k reads little more than one pass.
    """
    if k * GROUP * 2 > logits.shape[1]:
        return logits.topk(k).values
    groups = group_max(logits).topk(k, sorted=False).indices
    return _members(grouped(logits, float("-inf")), groups).topk(k).values


def _members(groups: Tensor, chosen: Tensor) -> Tensor:
    """[L, G, 128], [L, k] -> [L, k * 128] values of the chosen groups."""
    return groups.gather(1, chosen.unsqueeze(-1).expand(-1, -1, GROUP)).flatten(1)


def largest_ids(logits: Tensor, k: int) -> Tensor:
    """[L, k] int64 ids of the k largest logits in falling order, the lowest id first among equals.

    The order is total, so that the first ids of a row do not depend on how many a neighbour asked for. Those of a row
    with NaN mean nothing, and stay in range: a NaN with its sign set stands behind the -inf of the padding.
    """
    if k * GROUP >= logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    groups = grouped(logits, float("-inf"))
    chosen = _falling(groups.amax(-1)).topk(k, sorted=False).indices
    ids = torch.arange(groups.shape[1] * GROUP, device=logits.device).view(1, -1, GROUP).expand(len(logits), -1, -1)
    values, ids = _members(groups, chosen), _members(ids, chosen)
    return ids.gather(1, _rank_key(values, ids).topk(k).indices).clamp_max_(logits.shape[1] - 1)


def _falling(values: Tensor) -> Tensor:
    return _rank_key(values, torch.arange(values.shape[1], device=values.device).expand_as(values))


def _rank_key(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, all different: larger for a larger float32 value, then for a lower id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.long() << 32) + (0xFFFFFFFF - ids)


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


def log_mass(logits: Tensor, top: Tensor) -> Tensor:
    """[L, 1] log of the sum of exp(logit - top) of float32 rows; ln p of a token is (logit - top) - log_mass.

    top [L, 1] is the largest logit of each row. It is no part of the result: far from 0 it would swallow the sum.
    """
    return kept_mass(logits, top).sum(-1, keepdim=True).log_()


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
