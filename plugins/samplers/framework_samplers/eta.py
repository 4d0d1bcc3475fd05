"""Stage `eta`: a floor under the probability of a token that sinks where the distribution is wide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework_samplers.own_args import number, own
from framework_samplers.surprise import moments


class Eta:
    """Keeps a token iff p >= min(epsilon, sqrt(epsilon) * exp(-H)), H the entropy in nats; the best token always stays.

    Parameter of a request: `epsilon` in [0, 1), 0 is off. p and H are those of the incoming interval.
    Source: arXiv 2210.15191, section 4.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "eta",
        kind="threshold",
        fields=(Field("log_epsilon", "float32", init=-math.inf),),
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        extra_args=("epsilon",),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._log_epsilon = ctx.column("log_epsilon")

    def wants(self, params: SamplingParams) -> bool:
        return _epsilon(params) > 0

    def validate(self, params: SamplingParams) -> None:
        number("extra_args.eta.epsilon", _epsilon(params), 0.0, 1.0, "[)")

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        epsilon = float(_epsilon(params))
        self._log_epsilon.np[req_idx] = math.log(epsilon) if epsilon > 0 else -math.inf

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        kept = moments(logits, lo, hi)
        log_epsilon = self._log_epsilon.dev[rows.req_idx]
        log_eta = torch.minimum(log_epsilon, 0.5 * log_epsilon - kept.entropy)
        floor = torch.minimum(kept.top, (kept.top + kept.log_sum + log_eta).float())
        return torch.where(log_epsilon > -torch.inf, torch.maximum(lo, floor), lo), hi

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""


def _epsilon(params: SamplingParams) -> Any:
    return own(params, "eta").get("epsilon", 0.0)
