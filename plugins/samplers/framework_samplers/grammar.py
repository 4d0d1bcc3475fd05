"""Stage `grammar`: of a request with structured output, nothing but what its grammar allows.

The masks come with the step, one bit a token; which tokens are allowed is worked out on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams


class GrammarMask:
    """-inf for every token whose bit is not set in the row's mask; other rows pass bit for bit.

    Not graph_safe: a step has as many masks as it has rows with a grammar.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "grammar",
        kind="mask",
        params=("structured_outputs",),
        fused="bitmask",
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
        essential=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        # For each byte of a mask, which is that of 8 ids: the lesser of a logit and +inf is the logit, bit for bit.
        values, places = torch.arange(256, device=ctx.device), torch.arange(8, device=ctx.device)
        self._bounds = torch.where((values.unsqueeze(1) >> places) & 1 == 1, torch.inf, -torch.inf)

    def wants(self, params: SamplingParams) -> bool:
        return params.structured_outputs is not None

    def validate(self, params: SamplingParams) -> None:
        """Whether the constraint can be served is the grammar's word, which admission asks for."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        """A row keeps nothing: its place in the grammar is the scheduler's."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        allowed = rows.allowed
        if allowed is None:
            return
        octets = allowed.bits.view(torch.uint8).flatten().int()
        bounds = self._bounds.index_select(0, octets).view(len(allowed.bits), -1)[:, : logits.shape[1]]
        if allowed.rows is None:
            logits.clamp_max_(bounds)
        else:
            logits.index_copy_(0, allowed.rows, logits.index_select(0, allowed.rows).clamp_max_(bounds))

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return None if rows.allowed is None else {"words": rows.allowed.bits, "logits_rows": rows.allowed.rows}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes here with the tokens."""
