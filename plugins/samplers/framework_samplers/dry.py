"""Stage `dry`: takes the more off a token the longer the sequence is that it would repeat."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.history import NO_TOKEN, last_tokens
from framework_samplers.options import DryConfig
from framework_samplers.own_args import integer, number, own, token_ids
from framework_samplers.span import longest_history
from framework_samplers.wanting import apply_where
from framework_samplers.words import last_ids

MAX_MATCH = 50
"""Longest repetition that is told apart from longer ones, as in the source."""
MAX_BREAKERS = 64
NO_MATCH = -2  # equal to no id, and not to NO_TOKEN
HIGHEST = 1e30  # a penalty beyond float32 would forbid the token, which is a mask's part
BLOCK = 2**24
"""Most comparisons at a time, unless one row has more: 16 MB."""


class Dry:
    """logit -= multiplier * base^(length - allowed_length) for each token that would prolong a repetition of length >=
    allowed_length.

    The length of token t is that of the longest end of the text, up to 50, that stands earlier with t behind it. No
    repetition reaches over a sequence breaker, and none is penalised for one. Text is prompt and output together, or
    the last `range` tokens of it. Parameters of a request: `multiplier` in [0, 1000], 0 is off; `base` in [1, 100],
    default 1.75; `allowed_length` 1 or more, default 2; `range` 0 or more, default 0: all; `sequence_breakers`, at most
    64 ids. Source: `DRYLogitsProcessor`, github.com/oobabooga/text-generation-webui, pull request 5677.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "dry",
        kind="elementwise",
        fields=(
            Field("multiplier", "float32"),
            Field("base", "float32", init=1.0),
            Field("allowed_length", "int32", init=1),
            Field("span", "int32"),
            Field("breakers", "int32", width=MAX_BREAKERS, init=NO_MATCH),
        ),
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
        extra_args=("multiplier", "base", "allowed_length", "range", "sequence_breakers"),
    )

    def __init__(self, options: DryConfig, ctx: StageContext):
        self._vocab_size, self._token_ids = ctx.vocab_size, ctx.token_ids
        self._breakers_by_default = last_ids("sequence_breakers", options.sequence_breakers, ctx)
        if len(self._breakers_by_default) > MAX_BREAKERS:
            raise ValueError(f"sequence_breakers are {len(self._breakers_by_default)}, at most {MAX_BREAKERS} may be")
        self._multiplier, self._base = ctx.column("multiplier"), ctx.column("base")
        self._allowed_length, self._span = ctx.column("allowed_length"), ctx.column("span")
        self._breakers = ctx.column("breakers")

    def wants(self, params: SamplingParams) -> bool:
        return bool(own(params, "dry").get("multiplier", 0) > 0)

    def validate(self, params: SamplingParams) -> None:
        given = own(params, "dry")
        number("extra_args.dry.multiplier", given.get("multiplier", 0), 0.0, 1000.0)
        number("extra_args.dry.base", given.get("base", 1.75), 1.0, 100.0)
        integer("extra_args.dry.allowed_length", given.get("allowed_length", 2), 1)
        integer("extra_args.dry.range", given.get("range", 0), 0)
        self._breakers_of(params)

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        given, breakers = own(params, "dry"), self._breakers_of(params)
        self._multiplier.np[req_idx] = given.get("multiplier", 0)
        self._base.np[req_idx] = given.get("base", 1.75)
        self._allowed_length.np[req_idx] = min(given.get("allowed_length", 2), MAX_MATCH + 1)
        longest = longest_history(params, request, self._token_ids.shape[1])
        self._span.np[req_idx] = min(given.get("range", 0) or longest, longest)
        self._breakers.np[req_idx] = NO_MATCH
        self._breakers.np[req_idx, : len(breakers)] = breakers

    def apply(self, logits: Tensor, rows: Rows) -> None:
        apply_where(self._span.np[rows.req_idx_np] > 1, logits, rows, self._penalise)

    def _penalise(self, logits: Tensor, rows: Rows) -> None:
        breakers = self._breakers.dev[rows.req_idx]
        history = self._history(rows, int(self._span.np[rows.req_idx_np].max()))
        lengths = _match_lengths(history, _reference(history, breakers))
        following = history[:, :-1].long()
        penalty = self._penalty(lengths[:, 1:], following, rows)
        spared = breakers.long()
        as_it_was = torch.where(spared >= 0, logits.gather(1, spared.clamp(min=0)), -torch.inf)
        following = following.clamp(min=0)
        # The least of a token's penalised logits is that of its longest match.
        logits.scatter_reduce_(1, following, logits.gather(1, following) - penalty, "amin")
        logits.scatter_reduce_(1, spared.clamp(min=0), as_it_was, "amax")

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens but what stands before a row, which the context brings."""

    def _history(self, rows: Rows, width: int) -> Tensor:
        """[L, width] tokens before each row that count, the nearest first."""
        tokens = last_tokens(self._token_ids, rows, width)
        place = torch.arange(width, device=tokens.device)
        return torch.where(place < self._span.dev[rows.req_idx].unsqueeze(1), tokens, NO_TOKEN)

    def _penalty(self, lengths: Tensor, following: Tensor, rows: Rows) -> Tensor:
        """[L, n] float32 what each match costs the token that follows it, 0 where there is nothing to pay."""
        multiplier, base = (c.dev[rows.req_idx].double().unsqueeze(1) for c in (self._multiplier, self._base))
        beyond = lengths - self._allowed_length.dev[rows.req_idx].unsqueeze(1)
        cost = (multiplier * base.pow(beyond.clamp(min=0))).clamp_(max=HIGHEST)
        return torch.where((beyond >= 0) & (following >= 0), cost, 0.0).float()

    def _breakers_of(self, params: SamplingParams) -> tuple[int, ...]:
        given = own(params, "dry").get("sequence_breakers", self._breakers_by_default)
        return token_ids("extra_args.dry.sequence_breakers", given, self._vocab_size, MAX_BREAKERS)


def _reference(history: Tensor, breakers: Tensor) -> Tensor:
    """[L, M] the end of the text, which earlier places are compared with: sequence breakers match nothing."""
    end = history[:, :MAX_MATCH]
    is_breaker = (end.unsqueeze(2) == breakers.unsqueeze(1)).any(-1)
    return torch.where(is_breaker, NO_MATCH, end)


def _match_lengths(history: Tensor, reference: Tensor) -> Tensor:
    """[L, W] how many tokens from each place backwards equal those from the end of the text backwards."""
    rows_at_once = max(1, BLOCK // history.shape[1] // reference.shape[1])
    parts = zip(history.split(rows_at_once), reference.split(rows_at_once), strict=True)
    return torch.cat([_lengths(*part) for part in parts])


def _lengths(history: Tensor, reference: Tensor) -> Tensor:
    longest = reference.shape[1]
    # What is filled in behind the text equals nothing: a place runs into it before the end of the text does.
    backwards = functional.pad(history, (0, longest - 1), value=NO_TOKEN).unfold(1, longest, 1)
    place = torch.arange(longest, dtype=torch.uint8, device=history.device)
    return torch.where(backwards == reference.unsqueeze(1), longest, place).amin(-1).int()
