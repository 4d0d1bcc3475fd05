"""Stage `min_tokens`: no token may end the request before it has so many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams

MAX_IDS = 256
"""Ids a request may mask: a row of the request table has a place for each of them."""


class MinTokens:
    """Masks eos and every stop id while fewer than `min_tokens` tokens have been drawn.

    Eos ids that `ignore_eos` makes ordinary tokens stay what they are. Stop strings are the output side's part.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "min_tokens",
        kind="mask",
        fields=(Field("until", "int32"), Field("ids", "int32", width=MAX_IDS, init=-1)),
        params=("min_tokens",),
        fused="ban_until",
        caps=Capabilities(
            keeps=frozenset({"kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        essential=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._eos = frozenset(ctx.eos_token_ids)
        self._until, self._ids = ctx.column("until"), ctx.column("ids")

    def _endings(self, params: SamplingParams) -> list[int]:
        return sorted(set(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos))

    def wants(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0 and bool(self._endings(params))

    def validate(self, params: SamplingParams) -> None:
        count = len(self._endings(params))
        if params.min_tokens and count > MAX_IDS:
            raise ValueError(
                f"min_tokens={params.min_tokens} would mask {count} ids, eos and stop_token_ids together, and at most"
                f" {MAX_IDS} are possible; pass fewer stop_token_ids, or leave min_tokens out"
            )

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        ids = self._endings(params)
        self._until.np[req_idx] = request.num_prompt_tokens + params.min_tokens
        self._ids.np[req_idx] = -1
        self._ids.np[req_idx, : len(ids)] = ids

    def apply(self, logits: Tensor, rows: Rows) -> None:
        ids = self._ids.dev[rows.req_idx].long()
        is_early = (rows.position < self._until.dev[rows.req_idx]).unsqueeze(1)
        # The lesser of a logit and +inf is the logit, bit for bit: that is what an unused place gives token 0.
        bound = torch.where(is_early & (ids >= 0), -torch.inf, torch.inf)
        logits.scatter_reduce_(1, ids.clamp_(min=0), bound, "amin")

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {"until": self._until.dev, "ids": self._ids.dev}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens but the position, which the rows bring."""
