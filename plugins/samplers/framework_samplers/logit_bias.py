"""Stage `logit_bias`: numbers that a request adds to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework_samplers.token_ids import check_ids

MAX_ENTRIES = 1024
"""Tokens that a request may bias."""


class LogitBias:
    """Adds `logit_bias[id]` to the logit of each of its ids; what a mask has forbidden stays forbidden.

    Unused places add -0.0 to token 0, the one number that leaves every logit as it is, bit for bit.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "logit_bias",
        kind="elementwise",
        fields=(
            Field("count", "int32"),
            Field("ids", "int32", MAX_ENTRIES, pooled=True),
            Field("values", "float32", MAX_ENTRIES, init=-0.0, pooled=True),
        ),
        params=("logit_bias",),
        fused="bias",
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._count, self._ids, self._values = (ctx.column(name) for name in ("count", "ids", "values"))
        self._vocab_size = ctx.vocab_size

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def validate(self, params: SamplingParams) -> None:
        bias = params.logit_bias or {}
        check_ids("logit_bias", bias, self._vocab_size)
        if len(bias) > MAX_ENTRIES:
            raise ValueError(f"logit_bias has {len(bias)} ids and at most {MAX_ENTRIES} are possible; pass fewer")

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        count = len(params.logit_bias)
        self._count.np[req_idx] = count
        self._ids.take(req_idx)[:count] = list(params.logit_bias)
        self._values.take(req_idx)[:count] = list(params.logit_bias.values())

    def apply(self, logits: Tensor, rows: Rows) -> None:
        most = int(self._count.np[rows.req_idx_np].max(initial=0))
        ids = self._ids.dev[self._ids.slot[rows.req_idx], :most]
        values = self._values.dev[self._values.slot[rows.req_idx], :most]
        logits.scatter_add_(1, ids.long(), values)

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {
            "count": self._count.dev, "ids": self._ids.dev, "ids_place": self._ids.slot, "values": self._values.dev,
            "values_place": self._values.slot,
        }  # fmt: skip

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""
