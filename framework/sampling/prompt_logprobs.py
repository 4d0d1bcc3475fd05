"""Logprobs of prompts: which hidden states of a step they need, and what of a prompt is there so far.

A prompt may come in chunks: the last position of a chunk predicts the first token of the next one, and what a chunk
gives waits here until the prompt is whole. The runner calls in; a request that asks has every position computed.
Nothing of a prompt is sampled, so no stage runs there: in the processed modes too they are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from framework.batch import LogprobsColumns
from framework.sampling.logprobs import Measured, measure, num_top, to_host
from framework.sent import sent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import NewRequest, SchedulerOutput

SLICE_BYTES = 256 * 2**20
"""Most memory that float32 logits of a slice of a prompt take."""


@dataclass(slots=True)
class PromptSoFar:
    """One prompt. k: how many of the best tokens are told."""

    token_ids: NDArray[np.int32]
    k: int
    parts: list[LogprobsColumns] = field(default_factory=list)


@dataclass(slots=True)
class Span:
    """What a step computes of one prompt: `count` hidden states from token `offset` of the step on, which predict the
    prompt's tokens from `first` on. is_last: the prompt is whole after it."""

    prompt: PromptSoFar
    batch_row: int
    offset: int
    first: int
    count: int
    is_last: bool


class PromptLogprobs:
    """Prompts whose logprobs are being gathered, by row of the request table. is_log: logprobs, not logits."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int, *, is_log: bool) -> None:
        self._compute_logits, self._vocab_size, self._is_log = compute_logits, vocab_size, is_log
        self._rows_at_once = max(1, SLICE_BYTES // (4 * vocab_size))
        self._prompts: dict[int, PromptSoFar] = {}

    def add(self, new: NewRequest) -> None:
        """A request arrives, or begins anew after a preemption. One that has drawn tokens has had its logprobs too."""
        k = new.params.prompt_logprobs
        if k is not None and 1 < new.num_prompt_tokens == len(new.token_ids):
            self._prompts[new.req_idx] = PromptSoFar(new.token_ids, num_top(k, self._vocab_size))

    def release(self, req_idx: int) -> None:
        """Whoever had the row has left."""
        self._prompts.pop(req_idx, None)

    def spans(self, scheduled: SchedulerOutput) -> list[Span]:
        """What the step computes of the prompts that ask."""
        if not self._prompts:
            return []
        spans, offset = [], 0
        counts, starts = scheduled.num_scheduled_tokens.tolist(), scheduled.num_computed_tokens.tolist()
        for batch_row, (req_idx, count, start) in enumerate(zip(scheduled.rows.tolist(), counts, starts, strict=True)):
            prompt = self._prompts.get(req_idx)
            if prompt is not None:
                length = len(prompt.token_ids)
                is_last = start + count >= length
                spans.append(Span(prompt, batch_row, offset, start + 1, min(count, length - 1 - start), is_last))
                if is_last:
                    del self._prompts[req_idx]
            offset += count
        return spans

    def compute(self, hidden: Tensor, spans: Sequence[Span]) -> list[list[Measured]]:
        """Columns of each span on the device, in slices of its rows. hidden [T, H] of the step's tokens."""
        return [self._slices(hidden[s.offset : s.offset + s.count], s) for s in spans]

    def _slices(self, hidden: Tensor, span: Span) -> list[Measured]:
        token_ids = span.prompt.token_ids[span.first : span.first + span.count].astype(np.int64)
        columns = []
        for at in range(0, span.count, self._rows_at_once):
            logits = self._compute_logits(hidden[at : at + self._rows_at_once])
            ids = sent(token_ids[at : at + self._rows_at_once], hidden.device)
            columns.append(measure(logits, ids, span.prompt.k, is_log=self._is_log))
        return columns

    def collect(self, spans: Sequence[Span], computed: Sequence[Sequence[Measured]]) -> dict[int, LogprobsColumns]:
        """{batch row: columns of the prompt's tokens from the second on} of prompts that are whole. Waits for the
        device."""
        whole = {}
        for span, slices in zip(spans, computed, strict=True):
            span.prompt.parts += [to_host(columns, len(columns.rows_np)) for columns in slices]
            if span.is_last:
                whole[span.batch_row] = _joined(span.prompt.parts)
        return whole


def _joined(parts: Sequence[LogprobsColumns]) -> LogprobsColumns:
    return LogprobsColumns(
        sampled=np.concatenate([p.sampled for p in parts]),
        rank=np.concatenate([p.rank for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_logprobs=np.concatenate([p.top_logprobs for p in parts]),
        top_ranks=np.concatenate([p.top_ranks for p in parts]),
    )
