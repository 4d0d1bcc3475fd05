"""Stage `greedy`: the select stage of a pipeline in which every row is decided by argmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from framework.batch import NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import GREEDY_TEMPERATURE, SamplingParams
from framework.sampling.groups import best
from framework.sampling.interval import inside


class Greedy:
    """Takes the largest kept logit, the lowest id on ties.

    Keeps `argmax`: the pipeline decides every row before the stages that only reshape the distribution.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "greedy",
        kind="select",
        params=("temperature",),
        fused="argmax",
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        """Keeps nothing: a choice by argmax has neither options nor state."""

    def wants(self, params: SamplingParams) -> bool:
        return True

    def validate(self, params: SamplingParams) -> None:
        if "temperature" in params.named and not params.is_greedy:
            raise ValueError(
                f"always takes the best token, so temperature={params.temperature:g} would be ignored; leave it"
                f" out, set it below {GREEDY_TEMPERATURE:g}, or use sampler=gumbel"
            )

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        """A row keeps nothing."""

    def select(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> Tensor:
        return best(inside(logits, lo, hi))[1]

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""
