"""Stage `dynamic_temperature`: a temperature that follows the entropy of the distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import GREEDY_TEMPERATURE, SamplingParams
from framework.sampling.groups import num_larger
from framework.sampling.interval import open_interval
from framework_samplers.own_args import asks, number, own
from framework_samplers.surprise import moments

HIGHEST = 100.0


class DynamicTemperature:
    """Divides logits by low + (high - low) * (H / ln N)^exponent, at least 1e-5.

    H is the entropy in nats of the distribution that comes in, N the number of tokens that are not masked: a sure model
    is cooled to `low`, a flat distribution heated to `high`. Parameters of a request: `low` and `high` in [0, 100],
    default 1; `exponent` in (0, 10], default 1; low = high = 1 changes nothing. A temperature t with a range r of other
    programs is low = t - r, high = t + r, with `temperature` left at 1: that one divides the logits before this stage.
    Source: `llama_sampler_temp_ext` of llama.cpp (pull request 4972), after KoboldCpp's dynatemp.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "dynamic_temperature",
        kind="elementwise",
        fields=(Field("low", "float32", init=1.0), Field("span", "float32"), Field("exponent", "float32", init=1.0)),
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        extra_args=("low", "high", "exponent"),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._low, self._span, self._exponent = (ctx.column(name) for name in ("low", "span", "exponent"))

    def wants(self, params: SamplingParams) -> bool:
        return asks(params, self.spec.name) and not params.is_greedy and _bounds(params) != (1, 1)

    def validate(self, params: SamplingParams) -> None:
        if not asks(params, self.spec.name):
            return
        where = f"extra_args.{self.spec.name}"
        low, high = _bounds(params)
        low = number(f"{where}.low", low, 0.0, HIGHEST)
        number(f"{where}.high", high, low, HIGHEST)
        number(f"{where}.exponent", _exponent(params), 0.0, 10.0, "(]")

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        low, high = _bounds(params)
        self._low.np[req_idx], self._span.np[req_idx] = low, high - low
        self._exponent.np[req_idx] = _exponent(params)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        lo, hi = open_interval(len(logits), logits.device)
        masked = torch.full((len(logits), 1), -torch.inf, device=logits.device)
        width = num_larger(logits, masked).double().log()
        share = (moments(logits, lo, hi).entropy / width).clamp_(0.0, 1.0)  # a row of one token gives 0 / 0
        low, span, exponent = (c.dev[rows.req_idx].double() for c in (self._low, self._span, self._exponent))
        inverse = (low + span * share.pow(exponent)).clamp_(min=GREEDY_TEMPERATURE).reciprocal().float()
        # A row that is no distribution, or has one token, stays as it is.
        logits.mul_(torch.where(inverse.isnan(), 1.0, inverse).unsqueeze(1))

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""


def _bounds(params: SamplingParams) -> tuple[Any, Any]:
    given = own(params, "dynamic_temperature")
    return given.get("low", 1.0), given.get("high", 1.0)


def _exponent(params: SamplingParams) -> Any:
    return own(params, "dynamic_temperature").get("exponent", 1.0)
