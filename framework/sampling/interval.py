"""What threshold stages narrow: an interval of logits a row. A token is kept iff lo <= logit <= hi.

The pipeline starts from an open interval and passes it on; a stage that narrows a side returns a new tensor and never
writes into the one it got. Called by the pipeline, by threshold stages and by the draw.
"""

from __future__ import annotations

import torch
from torch import Tensor


def open_interval(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(lo, hi) float32 [L] that keep everything."""
    lo = torch.full((num_rows,), float("-inf"), device=device)
    hi = torch.full((num_rows,), float("inf"), device=device)
    lo.is_open = hi.is_open = True  # type: ignore[attr-defined]  # a mark on these very objects, see is_open
    return lo, hi


def is_open(bound: Tensor) -> bool:
    """Whether `bound` is a side of `open_interval` that nobody replaced.

    Known on the host without reading the tensor, which saves a pass over the logits; False only costs that pass.
    """
    return getattr(bound, "is_open", False)


def at_most(logits: Tensor, hi: Tensor) -> Tensor:
    """Logits with -inf above hi; the argument itself when hi is open."""
    if is_open(hi):
        return logits
    return torch.where(logits <= hi.unsqueeze(1), logits, float("-inf"))


def inside(logits: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Logits with -inf outside the interval; the argument itself when both sides are open."""
    logits = at_most(logits, hi)
    if is_open(lo):
        return logits
    return torch.where(logits >= lo.unsqueeze(1), logits, float("-inf"))


def drop_below(weights: Tensor, logits: Tensor, lo: Tensor) -> Tensor:
    """Makes weights [L, V] zero, in place, where the logit is below lo. Returns them."""
    if is_open(lo):
        return weights
    kept = torch.empty_like(weights)
    torch.ge(logits, lo.unsqueeze(1), out=kept)  # 0.0 and 1.0: several times quicker than a bool mask on a CPU
    return weights.mul_(kept)
