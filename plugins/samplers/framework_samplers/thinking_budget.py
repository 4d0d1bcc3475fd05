"""Stage `thinking_budget`: ends the thinking of a reasoning model after so many tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.errors import shown
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.history import last_tokens
from framework_samplers.options import ThinkingBudgetConfig
from framework_samplers.own_args import asks, integer, own
from framework_samplers.span import longest_history
from framework_samplers.wanting import apply_where
from framework_samplers.words import ids_of

OFF = -1
NEVER = 2**31 - 1


class ThinkingBudget:
    """Once `max_tokens` tokens stand behind the start of thinking, allows nothing but the tokens that end it.

    The start is the last one in prompt or output; a text in which an end stands behind it is past thinking, and is left
    alone. An end of several tokens is gone through one by one, from where the text is in it already. Parameter of a
    request: `max_tokens`, 0 or more.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "thinking_budget",
        kind="mask",
        fields=(Field("budget", "int32", init=OFF), Field("span", "int32")),
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
        extra_args=("max_tokens",),
    )

    def __init__(self, options: ThinkingBudgetConfig, ctx: StageContext):
        self._options, self._token_ids = options, ctx.token_ids
        self._start = torch.tensor(ids_of("start", options.start, ctx), dtype=torch.int32, device=ctx.device)
        self._end = torch.tensor(ids_of("end", options.end, ctx), dtype=torch.int32, device=ctx.device)
        self._budget, self._span = ctx.column("budget"), ctx.column("span")

    def wants(self, params: SamplingParams) -> bool:
        return "max_tokens" in own(params, "thinking_budget")

    def validate(self, params: SamplingParams) -> None:
        if not asks(params, "thinking_budget"):
            return
        if not (len(self._start) and len(self._end)):
            raise ValueError(
                f"the model has no tokenizer to tell where thinking begins ({shown(self._options.start)}) and ends"
                f" ({shown(self._options.end)}); give token ids by sampler.stages.thinking_budget.start and .end"
            )
        if self.wants(params):
            integer("extra_args.thinking_budget.max_tokens", _budget(params), 0)

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._budget.np[req_idx] = min(_budget(params), NEVER)
        self._span.np[req_idx] = longest_history(params, request, self._token_ids.shape[1])

    def apply(self, logits: Tensor, rows: Rows) -> None:
        apply_where(self._budget.np[rows.req_idx_np] != OFF, logits, rows, self._bound)

    def _bound(self, logits: Tensor, rows: Rows) -> None:
        tokens = last_tokens(self._token_ids, rows, int(self._span.np[rows.req_idx_np].max()))
        since_start, since_end = _since(tokens, self._start), _since(tokens, self._end)
        is_over = (since_start < since_end) & (since_start >= self._budget.dev[rows.req_idx])
        allowed = self._end[self._progress(tokens, since_start)].long().unsqueeze(1)
        kept = logits.gather(1, allowed)
        logits.masked_fill_(is_over.unsqueeze(1), -torch.inf).scatter_(1, allowed, kept)

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens but what stands before a row, which the context brings."""

    def _progress(self, tokens: Tensor, since_start: Tensor) -> Tensor:
        """[L] int64 how many tokens of the end the text ends with, all of them behind the start."""
        progress = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        for count in range(1, min(len(self._end) - 1, tokens.shape[1]) + 1):  # the longest one stays
            has = (tokens[:, :count] == self._end[:count].flip(0)).all(-1) & (since_start >= count)
            progress = torch.where(has, count, progress)
        return progress


def _since(tokens: Tensor, word: Tensor) -> Tensor:
    """[L] int32 tokens behind the last place where `word` stands, NEVER where it stands nowhere.

    tokens [L, W], the nearest first; word [n].
    """
    size = len(word)
    if size > tokens.shape[1]:
        return torch.full((len(tokens),), NEVER, dtype=torch.int32, device=tokens.device)
    stands = (tokens.unfold(1, size, 1) == word.flip(0)).all(-1)
    place = torch.arange(stands.shape[1], dtype=torch.int32, device=tokens.device)
    return torch.where(stands, place, NEVER).amin(-1)


def _budget(params: SamplingParams) -> Any:
    return own(params, "thinking_budget").get("max_tokens", OFF)
