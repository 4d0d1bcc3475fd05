"""From committed tokens to what the caller reads: one `OutputState` a live request, fed with what steps give it.

Knows neither scheduler nor steps in flight. Tokens and endings are those that were told, never those of the live
request: the scheduler may be ahead, and on another thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.engine.completion import Completion
from framework.engine.stats import RequestTimer
from framework.request import NewTokens, OutputKind, Request, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from framework.batch import LogprobsColumns, StepOutput
    from framework.tokenizer import Tokenizer


class OutputState:
    """Completions and times of one request so far.

    Kinds of output: `final` gives one, at the end; `cumulative` one for each `add`, with everything so far; `delta` one
    for each `add`, with what is new since the one before: its texts, token ids and logprobs concatenate to the final
    ones. The last output of every kind is `finished` and bears the reasons.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, now: float) -> None:
        self.request = request
        self._timer = RequestTimer(request.arrival_time, now)
        self._is_final = request.params.output_kind is OutputKind.FINAL
        self._completion = Completion(0, request.params, tokenizer)
        self._error: str | None = None
        self._decode = None if tokenizer is None else tokenizer.decode_token
        self._prompt_logprobs: TokenLogprobs | None = None
        if len(request.prompt_token_ids) == 1:  # no step has anything to say of it
            self._add_prompt_logprobs(None)

    def _add_prompt_logprobs(self, columns: LogprobsColumns | None) -> None:
        k = self.request.params.prompt_logprobs
        if k is not None:
            ids = self.request.prompt_token_ids
            self._prompt_logprobs = TokenLogprobs.of_prompt(ids, columns, k, self._decode)

    def add(self, new: NewTokens, step: StepOutput | None, now: float) -> RequestOutput | None:
        """Takes what a step gave; an output when the request is finished or streams.

        When a stop string ends the request here, its output is finished and `must_stop` says that the scheduler has to
        be told. What later steps, in flight by then, still give is left out: None.
        """
        if self.is_finished:
            return None
        num_taken = self._completion.add(new, None if step is None else step.logprobs)
        self._error = new.error
        if new.prompt_logprobs is not None:
            self._add_prompt_logprobs(new.prompt_logprobs)
        if num_taken:
            self._timer.tokens(now, num_taken, self.request.first_scheduled_time)
        if self.is_finished:
            self._timer.finish(now)
        elif self._is_final:
            return None
        return self._output()

    @property
    def is_finished(self) -> bool:
        return self._completion.finish_reason is not None

    @property
    def must_stop(self) -> bool:
        """Whether the request has ended by a stop string, so that the scheduler runs it still."""
        return self._completion.by_stop_string

    def _output(self) -> RequestOutput:
        r = self.request
        return RequestOutput(
            request_id=r.request_id,
            prompt=r.prompt,
            prompt_token_ids=r.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[self._completion.output()],
            finished=self.is_finished,
            num_cached_tokens=max(r.num_cached_tokens, 0),
            metrics=self._timer.metrics if self.is_finished else self._timer.snapshot(),
            error=self._error,
        )
