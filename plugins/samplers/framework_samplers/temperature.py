"""Stage `temperature`: flattens or sharpens the distribution before the thresholds see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams

HIGHEST = np.float32(8e37)  # its reciprocal is still a normal number: 0 would turn a masked -inf into NaN


class Temperature:
    """Multiplies logits by 1 / temperature. The reciprocal is taken on the host in float32, equal on every device."""

    spec: ClassVar[StageSpec] = StageSpec(
        "temperature",
        kind="elementwise",
        fields=(Field("inverse", "float32", init=1.0),),
        params=("temperature",),
        fused="scale",
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._inverse = ctx.column("inverse")

    def wants(self, params: SamplingParams) -> bool:
        return params.temperature != 1.0 and not params.is_greedy

    def validate(self, params: SamplingParams) -> None:
        """SamplingParams has checked its own fields, and there are no others to read."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._inverse.np[req_idx] = np.float32(1.0) / min(np.float32(min(params.temperature, 1e38)), HIGHEST)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        logits.mul_(self._inverse.dev[rows.req_idx].unsqueeze(1))

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {"factor": self._inverse.dev}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""
