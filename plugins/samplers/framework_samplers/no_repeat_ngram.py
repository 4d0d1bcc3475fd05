"""Stage `no_repeat_ngram`: no sequence of so many tokens stands twice in prompt and output together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.history import ngram_ends
from framework_samplers.own_args import asks, integer, own
from framework_samplers.span import longest_history
from framework_samplers.wanting import apply_where

MAX_SIZE = 64
"""Longest n-gram: each of its tokens costs a pass over the tokens before."""


class NoRepeatNgram:
    """Masks every token that would complete an n-gram which stands before it already, in the prompt or in the output.

    A request asks by `extra_args={"no_repeat_ngram": {"size": n}}`. Source: transformers' NoRepeatNGramLogitsProcessor.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "no_repeat_ngram",
        kind="mask",
        fields=(Field("size", "int32"), Field("span", "int32")),
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
        extra_args=("size",),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._size, self._span = ctx.column("size"), ctx.column("span")
        self._token_ids = ctx.token_ids

    def wants(self, params: SamplingParams) -> bool:
        return asks(params, self.spec.name)

    def validate(self, params: SamplingParams) -> None:
        if asks(params, self.spec.name):
            integer("extra_args.no_repeat_ngram.size", own(params, self.spec.name).get("size"), 1, MAX_SIZE)

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._size.np[req_idx] = own(params, self.spec.name)["size"]
        self._span.np[req_idx] = longest_history(params, request, self._token_ids.shape[1])

    def apply(self, logits: Tensor, rows: Rows) -> None:
        apply_where(self._size.np[rows.req_idx_np] > 0, logits, rows, self._mask)

    def _mask(self, logits: Tensor, rows: Rows) -> None:
        tokens = self._token_ids[rows.req_idx, : int(self._span.np[rows.req_idx_np].max())]
        longest = int(self._size.np[rows.req_idx_np].max())
        ends = ngram_ends(tokens, rows.position, self._size.dev[rows.req_idx], longest)
        # The lesser of a logit and +inf is the logit, bit for bit: that is what all other places give token 0.
        bound = torch.where(ends, -torch.inf, torch.inf)
        logits.scatter_reduce_(1, torch.where(ends, tokens, 0).long(), bound, "amin")

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens but what stands before a row, which the context brings."""
