"""Stage `top_p`: the nucleus, the smallest set of best tokens whose mass reaches top_p."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.groups import kept_mass, largest
from framework.sampling.interval import at_most, drop_below

FIRST_CANDIDATES = (64, 1024)
"""How many best tokens to look at before a row is sorted whole: peaked rows stop at the first."""


class TopP:
    """Keeps a token iff the mass of strictly larger logits inside the incoming interval is below top_p.

    Equal logits stay or go together; the best token always stays. Rows are looked at in tiers, and which tier
    settles a row depends on that row alone, so neighbours change no bit. Finding the rows left for the next tier reads
    one flag a row on the host: free on a CPU, a wait elsewhere, where a device's own kernel takes this stage's place.
    Source: arXiv 1904.09751.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "top_p",
        kind="threshold",
        fields=(Field("top_p", "float32", init=1.0),),
        params=("top_p",),
        fused="top_p",
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "batch_invariant", "deterministic"})
        ),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._top_p = ctx.column("top_p")

    def wants(self, params: SamplingParams) -> bool:
        return params.top_p < 1

    def validate(self, params: SamplingParams) -> None:
        """SamplingParams has checked its own fields, and there are no others to read."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._top_p.np[req_idx] = params.top_p

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        wanting = np.flatnonzero(self._top_p.np[rows.req_idx_np] < 1)
        if len(wanting) == 0:
            return lo, hi
        if len(wanting) == len(logits):
            return torch.maximum(lo, self._floor(logits, rows.req_idx, lo, hi)), hi
        index = torch.from_numpy(wanting).to(logits.device, non_blocking=True)
        part = logits.index_select(0, index)
        floor = self._floor(part, rows.req_idx[index], lo[index], hi[index])
        return lo.index_copy(0, index, torch.maximum(lo[index], floor)), hi

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {"top_p": self._top_p.dev}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""

    def _floor(self, logits: Tensor, req_idx: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        """[n] the smallest logit of each row's nucleus; lo still stands above it where the nucleus is the interval."""
        logits = at_most(logits, hi)
        top = logits.amax(-1, keepdim=True)
        total = kept_mass(logits, top, lo).sum(-1, dtype=torch.float64)
        row = _Rows(logits, top, lo, self._top_p.dev[req_idx] * total)
        first, *later = (*(c for c in FIRST_CANDIDATES if c < logits.shape[1]), logits.shape[1])
        floor, settled = row.nucleus(first)
        for count in later:
            left = (~settled).nonzero().squeeze(1)
            if len(left) == 0:
                break
            found, enough = row.take(left).nucleus(count)
            floor.index_copy_(0, left, found)
            settled.index_copy_(0, left, enough)
        return floor


@dataclass(frozen=True)
class _Rows:
    """Logits [n, V] with the best of each row [n, 1], its floor so far and the mass to reach, float64 [n]."""

    logits: Tensor
    top: Tensor
    lo: Tensor
    target: Tensor

    def take(self, index: Tensor) -> _Rows:
        return _Rows(*(t.index_select(0, index) for t in (self.logits, self.top, self.lo, self.target)))

    def nucleus(self, count: int) -> tuple[Tensor, Tensor]:
        """(smallest logit of the nucleus [n], whether it ends among the `count` best [n] bool).

        The last value may go on beyond the candidates: those tokens equal it and share its bound.
        """
        values = largest(self.logits, count)
        mass = drop_below((values - self.top).exp_(), values, self.lo).cumsum(-1, dtype=torch.float64)
        larger = functional.pad(mass, (1, -1))  # mass before each token
        last = ((larger < self.target.unsqueeze(1)).sum(-1, keepdim=True) - 1).clamp_(min=0)
        return values.gather(1, last).squeeze(1), mass[:, -1] >= self.target
