"""Stage `gumbel`: the select stage that draws from the kept tokens with noise keyed by seed and position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.draw import draw


class Gumbel:
    """Draws from the softmax of the kept logits: the same token for the same (seed, position, logits), anywhere."""

    spec: ClassVar[StageSpec] = StageSpec(
        "gumbel",
        kind="select",
        fields=(Field("draws", "int32"),),
        params=("seed",),
        fused="draw",
        caps=Capabilities(
            keeps=frozenset({"kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._draws = ctx.column("draws")

    def wants(self, params: SamplingParams) -> bool:
        return not params.is_greedy

    def validate(self, params: SamplingParams) -> None:
        """SamplingParams has checked its own fields, and there are no others to read."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._draws.np[req_idx] = 1  # the seed and the position come with the rows

    def select(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> Tensor:
        return draw(logits, rows.seed, rows.position, lo, hi)

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {"draws": self._draws.dev}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""
