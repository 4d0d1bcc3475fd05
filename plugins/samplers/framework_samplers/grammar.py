"""Stage `grammar`: of a request with structured output, nothing but what its grammar allows.

The masks come with the step, one bit a token; which tokens are allowed is worked out on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from framework.batch import NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework_samplers.bit_bounds import BitBounds


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
        self._bounds = BitBounds(ctx.device)

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
        if allowed.rows is None:
            self._bounds.clamp(logits, allowed.bits)
        else:
            masked = logits.index_select(0, allowed.rows)
            self._bounds.clamp(masked, allowed.bits)
            logits.index_copy_(0, allowed.rows, masked)

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return None if rows.allowed is None else {"words": rows.allowed.bits, "logits_rows": rows.allowed.rows}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes here with the tokens."""
