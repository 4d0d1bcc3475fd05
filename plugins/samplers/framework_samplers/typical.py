"""Stage `typical`: the tokens whose surprise is nearest to the entropy, up to a mass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework_samplers.own_args import number, own
from framework_samplers.surprise import moments

FIRST_CANDIDATES = (64, 1024)
"""How many of the nearest tokens to look at before a row is sorted whole: peaked rows stop at the first."""


class Typical:
    """Keeps the smallest set of tokens of least distance |-ln p - H| whose mass reaches `mass`; equal distances stay.

    Parameter of a request: `mass` in (0, 1], 1 is off. p and the entropy H are those of the incoming interval, in nats.
    With c the logit whose surprise is H, the distance of a token is |logit - c|. It grows with the logit above c and
    falls below c, in float32 too, so the tokens within a distance are those between the least and the largest logit
    among them: an interval, which may leave out the best token. Two logits as far above c as below it stay both.
    Finding the rows that the nearest tokens do not settle reads one flag a row on the host: free on a CPU, a wait
    elsewhere.
    Source: arXiv 2202.00666, section 4.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "typical",
        kind="threshold",
        fields=(Field("mass", "float32", init=1.0),),
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
        extra_args=("mass",),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._mass = ctx.column("mass")

    def wants(self, params: SamplingParams) -> bool:
        return _mass(params) < 1

    def validate(self, params: SamplingParams) -> None:
        number("extra_args.typical.mass", _mass(params), 0.0, 1.0, "(]")

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._mass.np[req_idx] = min(_mass(params), 1.0)

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        wanting = np.flatnonzero(self._mass.np[rows.req_idx_np] < 1)
        if len(wanting) == 0:
            return lo, hi
        if len(wanting) == len(logits):
            return self._narrowed(logits, rows.req_idx, lo, hi)
        index = torch.from_numpy(wanting).to(logits.device, non_blocking=True)
        part = (t.index_select(0, index) for t in (logits, rows.req_idx, lo, hi))
        new_lo, new_hi = self._narrowed(*part)
        return lo.index_copy(0, index, new_lo), hi.index_copy(0, index, new_hi)

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""

    def _narrowed(self, logits: Tensor, req_idx: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        rows = _measured(logits, lo, hi, self._mass.dev[req_idx])
        reach = rows.reach()
        kept = (rows.distance <= reach.unsqueeze(1)) & (rows.distance < torch.inf)
        least, largest = torch.where(kept, logits, torch.inf).amin(-1), torch.where(kept, logits, -torch.inf).amax(-1)
        return torch.maximum(lo, least), torch.minimum(hi, largest)


@dataclass(frozen=True)
class _Rows:
    """distance [n, V] float32, inf outside of the interval; weight [n, V] proportional to p; target [n] float64."""

    distance: Tensor
    weight: Tensor
    target: Tensor

    def reach(self) -> Tensor:
        """[n] distance of the last token that is kept."""
        vocab = self.distance.shape[1]
        first, *later = (*(c for c in FIRST_CANDIDATES if c < vocab), vocab)
        reach, settled = self._nearest(first)
        for count in later:
            left = (~settled).nonzero().squeeze(1)
            if len(left) == 0:
                break
            found, enough = self._take(left)._nearest(count)
            reach.index_copy_(0, left, found)
            settled.index_copy_(0, left, enough)
        return reach

    def _take(self, index: Tensor) -> _Rows:
        return _Rows(*(t.index_select(0, index) for t in (self.distance, self.weight, self.target)))

    def _nearest(self, count: int) -> tuple[Tensor, Tensor]:
        """(reach [n], whether it lies among the `count` nearest tokens [n] bool).

        Equal distances beyond the candidates do no harm: the mass of the nearer ones decides alone.
        """
        nearest = self.distance.topk(count, largest=False)
        mass = self.weight.gather(1, nearest.indices).cumsum(-1, dtype=torch.float64)
        last = (mass < self.target.unsqueeze(1)).sum(-1, keepdim=True).clamp_(max=count - 1)
        return nearest.values.gather(1, last).squeeze(1), mass[:, -1] >= self.target


def _measured(logits: Tensor, lo: Tensor, hi: Tensor, mass: Tensor) -> _Rows:
    kept = moments(logits, lo, hi)
    center = (kept.top + kept.log_sum - kept.entropy).float()
    is_in = (logits >= lo.unsqueeze(1)) & (logits <= hi.unsqueeze(1)) & (logits > -torch.inf)
    distance = torch.where(is_in, (logits - center.unsqueeze(1)).abs(), torch.inf)
    weight = torch.where(is_in, (logits - kept.top.unsqueeze(1)).exp(), 0.0)
    return _Rows(distance, weight, mass * kept.log_sum.exp())


def _mass(params: SamplingParams) -> Any:
    return own(params, "typical").get("mass", 1.0)
