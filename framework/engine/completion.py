"""One completion while it grows: its tokens, its text, its logprobs, and how it ends.

The scheduler ends a request by a token or by its length; a stop string is found here, in text, and the engine asks the
scheduler to end the request. What came before the end and what the caller is shown of it is decided here alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from framework.engine.detokenizer import Detokenizer
from framework.engine.stop import StopStrings
from framework.request import CompletionOutput, OutputKind, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from framework.batch import LogprobsColumns
    from framework.request import NewTokens, SamplingParams
    from framework.tokenizer import Tokenizer


class RowHeard(NamedTuple):
    """What k steps gave a completion in batch row `row`: token_ids [k], and logprobs [k] of these or none."""

    completion: int
    row: int
    token_ids: list[int]
    logprobs: list[float]


class Completion:
    """Completion `index` of a request with these parameters.

    token_ids       every token that counts, the one that ended it too
    finish_reason   None while it goes on
    by_stop_string  it has ended by a stop string, of which the scheduler knows nothing
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index, self._kind, self._min_tokens = index, params.output_kind, params.min_tokens
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.by_stop_string = False
        has_text = params.detokenize and tokenizer is not None
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens) if has_text and tokenizer else None
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        # Nobody reads the text of a final output before its end: then it is made in one go.
        self._is_late = self._kind is OutputKind.FINAL and self._stops is None
        self._parts: list[str] = []  # of the text: all, or for deltas what the last output had not
        self._num_logprobs = 0 if params.logprobs is None else params.logprobs
        decode = None if tokenizer is None else tokenizer.decode_token
        self._logprobs = TokenLogprobs(decode) if params.asks_logprobs else None
        self._payloads: dict[str, list[Any]] = {}  # an entry a token, up to the last one of which something was told
        self._num_sent = 0  # tokens in outputs already given, for deltas

    def add(self, new: NewTokens, columns: LogprobsColumns | None) -> int:
        """Takes what a step gave, up to the token that completes a stop string; returns the number of tokens taken."""
        assert self.finish_reason is None, f"completion {self.index} has ended, and gets {new.token_ids}"
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        # An eos or stop id is told by the scheduler, and the text leaves it out.
        has_end = new.finish_reason == "stop" and not new.ends_in_text
        visible = new.token_ids[:-1] if has_end else new.token_ids
        num_taken = self._add_text(visible) or len(new.token_ids)
        taken = new.token_ids[:num_taken]
        for stage, entries in new.payloads.items():
            self._filled(stage).extend(entries[:num_taken])
        self.token_ids += taken
        if self._logprobs is not None and taken:
            self._logprobs.extend(taken, columns, new.logprobs_row, self._num_logprobs)
        if self.finish_reason is not None:
            self._end_text(has_end)
        return num_taken

    def hear(self, heard: RowHeard, columns: Sequence[LogprobsColumns]) -> None:
        """Takes a token each of some steps, which end nothing and of which nothing is shown yet."""
        assert self.finish_reason is None, f"completion {self.index} has ended, and gets {heard.token_ids}"
        self.token_ids += heard.token_ids
        if self._logprobs is not None:
            rows = [heard.row] * len(columns)
            self._logprobs.extend_by_steps(heard.token_ids, columns, rows, self._num_logprobs, heard.logprobs)

    def _filled(self, stage: str) -> list[Any]:
        """What the stage told, with None for tokens of which it told nothing."""
        told = self._payloads.setdefault(stage, [])
        told += [None] * (len(self.token_ids) - len(told))
        return told

    def _add_text(self, visible: Sequence[int]) -> int:
        """Shows what is due; the number of tokens up to the one that completes a stop string, 0 when none does."""
        if self._detokenizer is None or self._is_late:
            return 0
        if self._stops is None:
            self._parts.append(self._detokenizer.add(visible))
            return 0
        for count, token in enumerate(visible, 1):
            piece, may_match = self._detokenizer.add([token]), len(self.token_ids) + count > self._min_tokens
            self._parts.append(self._stops.add(piece, self._detokenizer.rest, may_match=may_match))
            if self._stops.match is not None:
                self.finish_reason, self.stop_reason, self.by_stop_string = "stop", self._stops.match, True
                return count
        return 0

    def _end_text(self, has_end: bool) -> None:
        """Shows what is left, of a text that no stop string has ended. has_end: its last token is not shown."""
        if self._detokenizer is None or self.by_stop_string:
            return
        if self._is_late:
            self._parts.append(self._detokenizer.add(self.token_ids[:-1] if has_end else self.token_ids))
        end = self._detokenizer.finish()
        self._parts.append(end if self._stops is None else self._stops.finish(end))

    def output(self) -> CompletionOutput:
        """What is new since the last output (delta), or all of it."""
        ids, logprobs, text, first = self.token_ids, self._logprobs, "".join(self._parts), 0
        if self._kind is OutputKind.DELTA:
            first, self._num_sent, self._parts = self._num_sent, len(ids), []
            ids = ids[first:]
            logprobs = logprobs.view(first) if logprobs is not None else None
        else:
            self._parts = [text]
            if self.finish_reason is None:  # out of reach of later tokens
                ids = ids[:]
                logprobs = logprobs.view() if logprobs is not None else None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=ids,
            cumulative_logprob=self._logprobs.cumulative if self._logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            payloads={stage: self._filled(stage)[first:] for stage in self._payloads},
        )
