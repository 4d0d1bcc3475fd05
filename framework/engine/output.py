"""From committed tokens to what the caller reads: one `OutputState` a live request, fed with what steps give it.

Knows neither scheduler nor steps in flight. Tokens and endings are those that were told, never those of the live
request: the scheduler may be ahead, and on another thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.engine.completion import Completion
from framework.engine.siblings import siblings_of
from framework.engine.stats import RequestTimer
from framework.request import NewTokens, OutputKind, Request, RequestOutput, RequestStatus, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from framework.batch import LogprobsColumns, StepOutput
    from framework.engine.completion import RowHeard
    from framework.request import RequestMetrics
    from framework.tokenizer import Tokenizer


class OutputState:
    """Completions and times of one request so far.

    Kinds of output: `final` gives one, at the end; `cumulative` one for each step, with everything so far; `delta` one
    for each step, with what is new since the one before: its texts, token ids and logprobs concatenate to the final
    ones. Every output holds all n completions. The last one of every kind is `finished`.

    requests  those that the scheduler runs for it, one a completion
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, now: float) -> None:
        self.request, self.requests = request, siblings_of(request)
        self._timer = RequestTimer(request.arrival_time, now, len(self.requests))
        p = request.params
        self._is_final = p.output_kind is OutputKind.FINAL
        self._completions = [Completion(r.sample_index, r.params, tokenizer) for r in self.requests]
        self.has_siblings = len(self.requests) > 1
        self.is_silent = self._is_final and not p.stop  # before its end nobody asks what it has got
        # Before the end there is nothing to do but to count: what nearly every row of nearly every step comes to.
        self._only_counts = self.is_silent and not p.asks_logprobs and p.prompt_logprobs is None
        self._has_news = False  # since the last output
        self._stopped: list[tuple[str, str]] = []
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

    def add(self, new: NewTokens, step: StepOutput | None, now: float, more: bool = False) -> RequestOutput | None:
        """Takes what a step gave to one of the requests; an output when all have finished, or with every step.

        more  the same step has given something to another one as well: the output comes with that
        What later steps, in flight by then, still give to a request that a stop string has ended here is left out.
        """
        completion = self._completions[new.request.sample_index]
        if completion.finish_reason is None:
            if self._only_counts and new.finish_reason is None and not new.payloads:
                completion.token_ids += new.token_ids
                self._timer.tokens(now, len(new.token_ids), self.request.first_scheduled_time, new.request.sample_index)
                return None
            self._take(completion, new, step, now)
        if more or not self._has_news or (self._is_final and not self.is_finished):
            return None
        self._has_news = False
        return self._output()

    def hear(
        self,
        rows: Sequence[RowHeard],
        columns: Sequence[LogprobsColumns],
        moments: Sequence[float],
        gaps: Sequence[float],
    ) -> None:
        """Takes what k steps gave, a token each to each of some of its requests, and that ended none of them.

        Only of a silent state.
        columns  logprobs of each of the steps, a row each batch row; empty without any
        moments  [k] of the steps; gaps [k - 1] the times between them
        """
        for heard in rows:
            self._completions[heard.completion].hear(heard, columns)
        self._timer.steps(moments, gaps, self.request.first_scheduled_time, [heard.completion for heard in rows])

    def _take(self, completion: Completion, new: NewTokens, step: StepOutput | None, now: float) -> None:
        self._has_news = True
        num_taken = completion.add(new, None if step is None else step.logprobs)
        self._error = self._error or new.error
        if completion.by_stop_string:
            self._stopped.append((new.request.request_id, str(completion.stop_reason)))
        if new.prompt_logprobs is not None:
            self._add_prompt_logprobs(new.prompt_logprobs)
        if num_taken:
            self._timer.tokens(now, num_taken, self.request.first_scheduled_time, completion.index)
        if self.is_finished:
            self._timer.finish(now)

    @property
    def metrics(self) -> RequestMetrics:
        """Times so far, which later tokens change; those of a silent state may be some steps behind."""
        return self._timer.metrics

    @property
    def is_finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self._completions)

    @property
    def is_running(self) -> bool:
        """Whether a request of it runs, or has ended in a step of which nothing was told."""
        told = [completion.finish_reason is not None for completion in self._completions]
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        return any(
            r.status is running or (r.status is finished and not t) for r, t in zip(self.requests, told, strict=True)
        )

    @property
    def has_stopped(self) -> bool:
        """Whether `take_stopped` has something to tell."""
        return bool(self._stopped)

    def take_stopped(self) -> list[tuple[str, str]]:
        """(request id, stop string) of requests that have ended here since the last call: the scheduler runs them
        until it is told."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _output(self) -> RequestOutput:
        r = self.request
        return RequestOutput(
            request_id=r.request_id,
            prompt=r.prompt,
            prompt_token_ids=r.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[completion.output() for completion in self._completions],
            finished=self.is_finished,
            num_cached_tokens=max(r.num_cached_tokens, 0),
            metrics=self._timer.metrics if self.is_finished else self._timer.snapshot(),
            error=self._error,
        )
