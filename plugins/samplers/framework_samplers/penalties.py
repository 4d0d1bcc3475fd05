"""Stage `penalties`: lowers tokens that have been there, by repetition, frequency and presence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from framework.batch import PER_TOKEN, Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.groups import row_blocks
from framework.sampling.history import drafts_before, last_tokens, taken
from framework_samplers.span import longest_history

IN_PROMPT = 1 << 30
"""Set in the count of a token that stands in the prompt: one number a token says all that a penalty asks."""
DENSE_FROM = 16
"""A token before a row costs as much as so many of the vocabulary: with longer histories all of it is looked at."""
LOWEST = np.float32(1e-30)  # a smaller repetition penalty would lift a logit to infinity, or turn -inf into NaN


class Penalties:
    """l / r if l > 0 else l * r for tokens of prompt or output; then l - (frequency * count + presence) for output.

    Counts are kept on the device as tokens are taken, and made anew of the known ones when a request comes back. Draft
    rows count the drafts before them. Sources: CTRL, arXiv 1909.05858 (repetition); OpenAI's API (the other two).
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "penalties",
        kind="elementwise",
        fields=(
            Field("repetition", "float32", init=1.0),
            Field("frequency", "float32"),
            Field("presence", "float32"),
            Field("span", "int32"),
            Field("seen", "int32", PER_TOKEN, pooled=True),
        ),
        params=("repetition_penalty", "frequency_penalty", "presence_penalty"),
        fused="penalties",
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._repetition, self._frequency, self._presence, self._span, self._seen = (
            ctx.column(field.name) for field in self.spec.fields
        )
        self._token_ids, self._vocab_size = ctx.token_ids, ctx.vocab_size

    def wants(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def validate(self, params: SamplingParams) -> None:
        """SamplingParams has checked its own fields, and there are no others to read."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._repetition.np[req_idx] = max(np.float32(params.repetition_penalty), LOWEST)
        self._frequency.np[req_idx] = params.frequency_penalty
        self._presence.np[req_idx] = params.presence_penalty
        self._span.np[req_idx] = longest_history(params, request, self._token_ids.shape[1])
        prompt, output = np.split(request.token_ids, [request.num_prompt_tokens])
        seen = self._seen.take(req_idx)
        seen[:] = np.bincount(output, minlength=self._vocab_size)
        seen[prompt] |= IN_PROMPT

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Changes the tokens that stand before each row where those are few, else looks at the whole vocabulary."""
        longest = int(self._span.np[rows.req_idx_np].max(initial=0))
        drafts = drafts_before(self._token_ids, rows)
        if longest * DENSE_FROM < logits.shape[1]:
            self._apply_to(last_tokens(self._token_ids, rows, longest), logits, rows, drafts)
        else:
            self._apply_to_all(logits, rows, drafts.long())

    def _apply_to(self, tokens: Tensor, logits: Tensor, rows: Rows, drafts: Tensor) -> None:
        """Tokens [L, n] with repeats: equal ones are given equal logits. Token 0 stands in unused places."""
        tokens = tokens.clamp(min=0).long()
        place = self._seen.slot[rows.req_idx].long().unsqueeze(1) * self._vocab_size
        seen = self._seen.dev.view(-1)[place + tokens]
        for draft in drafts.unsqueeze(2).unbind(1):
            seen += (tokens == draft).int()
        values = logits.gather(1, tokens)
        repetition, frequency, presence = (
            column.dev[rows.req_idx].unsqueeze(1) for column in (self._repetition, self._frequency, self._presence)
        )
        penalise_repetition(values, seen, repetition)
        logits.scatter_(1, tokens, values.sub_(lost_by_output(seen, frequency, presence)))

    def _apply_to_all(self, logits: Tensor, rows: Rows, drafts: Tensor) -> None:
        """What no row of a block asks for is passed over there; it would leave every bit as it is."""
        repeats = self._repetition.np[rows.req_idx_np] != 1
        counts = (self._frequency.np[rows.req_idx_np] != 0) | (self._presence.np[rows.req_idx_np] != 0)
        for block in row_blocks(logits):
            by_repetition, by_output = repeats[block].any(), counts[block].any()
            if not by_repetition and not by_output:
                continue
            seen = self._seen_by(rows.req_idx[block], drafts[block])
            repetition, frequency, presence = (
                column.dev[rows.req_idx[block]].unsqueeze(1)
                for column in (self._repetition, self._frequency, self._presence)
            )
            if by_repetition:
                penalise_repetition(logits[block], seen, repetition)
            if by_output:
                logits[block].sub_(lost_by_output(seen, frequency, presence))

    def _seen_by(self, req_idx: Tensor, drafts: Tensor) -> Tensor:
        """[n, V] int32, a copy: what the rows have committed, and the drafts [n, k] before each."""
        seen = self._seen.dev.index_select(0, self._seen.slot[req_idx])
        if drafts.shape[1]:
            seen.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).int())
        return seen

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        if rows.drafts.shape[1]:
            return None  # the drafts before a row are counted here
        return {
            "repetition": self._repetition.dev, "frequency": self._frequency.dev, "presence": self._presence.dev,
            "seen": self._seen.dev, "place": self._seen.slot,
        }  # fmt: skip

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        slot = self._seen.slot[rows.req_idx].long()
        tokens, is_taken = taken(rows, sampled, num_valid)
        count = (is_taken & (slot > 0)).int()  # place 0 is nobody's, and stays neutral
        self._seen.dev.view(-1).index_add_(0, slot * self._vocab_size + tokens, count)


def penalise_repetition(logits: Tensor, seen: Tensor, repetition: Tensor) -> None:
    """l / r if l > 0 else l * r where a token was seen, in place. logits, seen [n, V], repetition [n, 1].

    That is the lesser of the two for r >= 1 and the larger one below, which needs no mask: those cost a CPU several
    times as much as arithmetic.
    """
    was_seen = torch.empty_like(logits)
    torch.ne(seen, 0, out=was_seen)
    by = (1 - was_seen).addcmul_(was_seen, repetition)  # r or 1, and exactly so
    sign = torch.where(repetition < 1, -1.0, 1.0)
    logits.mul_(sign)
    torch.minimum(logits / by, by.mul_(logits), out=logits)
    logits.mul_(sign)


def lost_by_output(seen: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """[n, V] float32 frequency * count + presence where a token stands in the output, else 0. Overwrites `seen`."""
    count = seen.bitwise_and_(IN_PROMPT - 1).float()
    lost = count * frequency
    return lost.add_(count.clamp_(max=1).mul_(presence))
