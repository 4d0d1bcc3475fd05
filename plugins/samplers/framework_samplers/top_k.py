"""Stage `top_k`: the k best tokens of a row, and every token that equals the last of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.groups import largest
from framework.sampling.interval import at_most


class TopK:
    """Keeps a token iff its logit is at least the k-th largest inside the incoming interval; ties are kept.

    Reads the k of the step's rows on the host, so one `topk` of the largest k in use serves them all.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "top_k",
        kind="threshold",
        fields=(Field("k", "int32", init=0),),
        params=("top_k",),
        fused="top_k",
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "batch_invariant", "deterministic"})
        ),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._k = ctx.column("k")
        self._vocab_size = ctx.vocab_size

    def wants(self, params: SamplingParams) -> bool:
        return self._limit(params) > 0

    def validate(self, params: SamplingParams) -> None:
        """SamplingParams has checked its own fields, and there are no others to read."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._k.np[req_idx] = self._limit(params)

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        most = int(self._k.np[rows.req_idx_np].max(initial=0))
        if most == 0:
            return lo, hi
        # Fewer than k tokens inside the interval put the k-th largest below lo, which then stands.
        values = largest(at_most(logits, hi), most)
        k = self._k.dev[rows.req_idx].long()
        kth = values.gather(1, (k - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
        return torch.where(k > 0, torch.maximum(lo, kth), lo), hi

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {"k": self._k.dev}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""

    def _limit(self, params: SamplingParams) -> int:
        """k, 0 for off: -1, 0, and a whole vocabulary or more."""
        return params.top_k if 0 < params.top_k < self._vocab_size else 0
