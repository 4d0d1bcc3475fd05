"""Stage `allowed_ids`: a request's list of the only tokens that may be drawn for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from framework.batch import PER_32_TOKENS, Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.groups import row_blocks
from framework_samplers.bit_bounds import BitBounds
from framework_samplers.token_ids import check_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray


class AllowedIds:
    """Masks every token that is not in `allowed_token_ids`.

    A row holds one bit a token, so that a list of any length costs the same: bit id % 32 of word id // 32.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "allowed_ids",
        kind="mask",
        fields=(Field("words", "int32", PER_32_TOKENS, init=-1, pooled=True),),
        params=("allowed_token_ids",),
        fused="allowed",
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
        essential=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._words = ctx.column("words")
        self._vocab_size = ctx.vocab_size
        self._bounds = BitBounds(ctx.device)

    def wants(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def validate(self, params: SamplingParams) -> None:
        check_ids("allowed_token_ids", params.allowed_token_ids or (), self._vocab_size)

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._words.take(req_idx)[:] = packed_bits(params.allowed_token_ids, self._vocab_size)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        slot, words = self._words.slot[rows.req_idx], self._words.dev
        for block in row_blocks(logits):
            self._bounds.clamp(logits[block], words.index_select(0, slot[block]))

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        return {"words": self._words.dev, "place": self._words.slot}

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""


def packed_bits(ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """[ceil(V / 32)] int32 words with one bit set for each of the ids, the lowest id in the lowest bit."""
    is_set = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    is_set[list(ids)] = 1
    return np.packbits(is_set, bitorder="little").view("<i4").astype(np.int32)
