"""Stage `chosen_ids`: tells logits and logprobs of a short list of ids at each token, such as the answers of a quiz."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.interval import open_interval
from framework_samplers.options import ChosenIdsConfig
from framework_samplers.own_args import asks, own, token_ids
from framework_samplers.surprise import moments

MAX_IDS = 64
"""Ids a request may ask for: a row of the request table has a place for each of them."""


class ChosenIds:
    """For each token {"logits": {id: logit}, "logprobs": {id: logprob}} of the model's own distribution.

    A request asks with extra_args={"chosen_ids": {"ids": [...]}}, at most 64, and reads
    `CompletionOutput.payloads["chosen_ids"]`.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "chosen_ids",
        kind="observe",
        fields=(Field("ids", "int32", width=MAX_IDS, init=-1),),
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        extra_args=("ids",),
        tells_requests=True,
    )

    def __init__(self, options: ChosenIdsConfig, ctx: StageContext):
        self._vocab_size = ctx.vocab_size
        self._default = token_ids("ids", options.ids, ctx.vocab_size, MAX_IDS)
        self._ids = ctx.column("ids")

    def wants(self, params: SamplingParams) -> bool:
        return asks(params, "chosen_ids")

    def validate(self, params: SamplingParams) -> None:
        if asks(params, "chosen_ids") and not self._asked(params):
            raise ValueError(
                "extra_args.chosen_ids.ids must not be empty: name token ids, or configure some for all requests by"
                " sampler.stages.chosen_ids.ids"
            )

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        ids = self._asked(params)
        self._ids.np[req_idx] = -1
        self._ids.np[req_idx, : len(ids)] = ids

    def observe(self, raw_logits: Tensor, logits: Tensor, rows: Rows, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(ids [L, 64], -1 for none; their logits; their logprobs) on the device, float32."""
        raw, chosen = raw_logits.float(), self._ids.dev[rows.req_idx].long()
        values = raw.gather(1, chosen.clamp(min=0))
        whole = moments(raw, *open_interval(len(raw), raw.device))
        # The best logit is taken off first: values far from 0 would swallow the sum.
        logprobs = (values - whole.top.unsqueeze(1)) - whole.log_sum.unsqueeze(1)
        return chosen, values, logprobs.float()

    def collect(self, payload: tuple[Tensor, Tensor, Tensor]) -> list[dict[str, dict[int, float]]]:
        return [
            {"logits": _present(ids, logits), "logprobs": _present(ids, logprobs)}
            for ids, logits, logprobs in zip(*(column.tolist() for column in payload), strict=True)
        ]

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""

    def _asked(self, params: SamplingParams) -> tuple[int, ...]:
        given = own(params, "chosen_ids").get("ids", self._default)
        return token_ids("extra_args.chosen_ids.ids", given, self._vocab_size, MAX_IDS)


def _present(ids: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    return {i: value for i, value in zip(ids, values, strict=True) if i >= 0}
