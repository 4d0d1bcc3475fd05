"""Stage `top_p`: the nucleus, the smallest set of best tokens whose mass reaches top_p."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.groups import group_sums, largest, weights
from framework.sampling.interval import inside
from framework_samplers.extra_args import refuse_extra_args

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
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "batch_invariant", "deterministic"})
        ),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._top_p = ctx.column("top_p")

    def wants(self, params: SamplingParams) -> bool:
        return params.top_p < 1

    def validate(self, params: SamplingParams) -> None:
        refuse_extra_args(self.spec.name, params)

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._top_p.np[req_idx] = params.top_p

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        wanting = np.flatnonzero(self._top_p.np[rows.req_idx_np] < 1)
        if len(wanting) == 0:
            return lo, hi
        if len(wanting) == len(logits):
            return torch.maximum(lo, self._floor(logits, rows.req_idx, lo, hi)), hi
        index = torch.from_numpy(wanting).to(logits.device)
        part = logits.index_select(0, index)
        floor = self._floor(part, rows.req_idx[index], lo[index], hi[index])
        return lo.index_copy(0, index, torch.maximum(lo[index], floor)), hi

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""

    def _floor(self, logits: Tensor, req_idx: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        """[n] the smallest kept logit of each row."""
        kept = inside(logits, lo, hi)
        top = kept.amax(-1, keepdim=True)
        total = group_sums(weights(kept, top)).sum(-1, dtype=torch.float64)
        target = self._top_p.dev[req_idx] * total
        floor = torch.empty_like(lo)
        left = np.arange(len(logits))
        for count in (*(c for c in FIRST_CANDIDATES if c < logits.shape[1]), logits.shape[1]):
            index = torch.from_numpy(left).to(logits.device)
            found, settled = _nucleus(kept[index], top[index], target[index], count)
            floor.index_copy_(0, index, found)
            left = left[~settled.cpu().numpy()]
            if count == logits.shape[1] or len(left) == 0:
                break
        return floor


def _nucleus(kept: Tensor, top: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(smallest kept logit [n], whether it was among the `count` best [n] bool)."""
    values = largest(kept, count)
    mass = (values - top).exp_().cumsum(-1, dtype=torch.float64)
    larger = functional.pad(mass, (1, -1))  # mass before each token
    last = ((larger < target.unsqueeze(1)).sum(-1, keepdim=True) - 1).clamp_(min=0)
    # The last candidate's value may go on beyond the candidates, but those tokens equal it and share its bound.
    return values.gather(1, last).squeeze(1), mass[:, -1] >= target
