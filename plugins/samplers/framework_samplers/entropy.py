"""Stage `entropy`: tells how sure the model was of each token, before the pipeline and behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.interval import open_interval
from framework_samplers.own_args import asks
from framework_samplers.surprise import moments


class Entropy:
    """For each token {"raw": H of the model's logits, "processed": H of what was drawn from}, in nats.

    A request asks with extra_args={"entropy": {}}, and reads `CompletionOutput.payloads["entropy"]`. A greedy row has
    the distribution that its best token is taken from for a processed one: after masks, bias and penalties.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "entropy",
        kind="observe",
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        tells_requests=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        """Keeps nothing: it looks, and says what it saw."""

    def wants(self, params: SamplingParams) -> bool:
        return asks(params, "entropy")

    def validate(self, params: SamplingParams) -> None:
        """It takes no parameters, and admission has refused others."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        """A row keeps nothing."""

    def observe(self, raw_logits: Tensor, logits: Tensor, rows: Rows, ids: Tensor) -> Tensor:
        """[L, 2] float64 on the device."""
        lo, hi = open_interval(len(logits), logits.device)
        return torch.stack([moments(each.float(), lo, hi).entropy for each in (raw_logits, logits)], 1)

    def collect(self, payload: Tensor) -> list[dict[str, float]]:
        return [{"raw": raw, "processed": processed} for raw, processed in payload.tolist()]

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""
