"""Stage `min_p`: a floor under the probability of a token, relative to the most likely one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.interval import at_most


class MinP:
    """Keeps a token iff logit >= max + ln(min_p), the max being that of the incoming interval.

    Source: arXiv 2407.01082.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "min_p",
        kind="threshold",
        fields=(Field("log_min_p", "float32", init=-math.inf),),
        params=("min_p",),
        fused="min_p",
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._log_min_p = ctx.column("log_min_p")

    def wants(self, params: SamplingParams) -> bool:
        return params.min_p > 0

    def validate(self, params: SamplingParams) -> None:
        """SamplingParams has checked its own fields, and there are no others to read."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._log_min_p.np[req_idx] = math.log(params.min_p) if params.min_p > 0 else -math.inf

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        top = at_most(logits, hi).amax(-1)  # lo cannot exclude the best token
        return torch.maximum(lo, top + self._log_min_p.dev[rows.req_idx]), hi

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {"log_min_p": self._log_min_p.dev}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""
