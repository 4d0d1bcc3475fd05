"""From committed tokens to what the caller reads: text, logprobs, metrics, RequestOutputs.

One `OutputState` a live request; the engine feeds it the step's tokens and asks for an output when one is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from framework.engine.detokenizer import Detokenizer
from framework.engine.stats import RequestTimer
from framework.request import CompletionOutput, NewTokens, OutputKind, Request, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from framework.batch import StepOutput
    from framework.tokenizer import Tokenizer


class OutputState:
    """Text, logprobs and times of one request so far.

    Tokens and endings are those it was given, never those of the live request: with steps in flight the scheduler may
    be ahead of what is being told here, and on another thread.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, now: float) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._timer = RequestTimer(request.arrival_time, now)
        p = request.params
        self._kind: OutputKind = p.output_kind
        self._has_text = p.detokenize and tokenizer is not None
        incremental = self._has_text and self._kind is not OutputKind.FINAL
        self._detokenizer = Detokenizer(tokenizer, p.skip_special_tokens) if incremental and tokenizer else None
        decode: Any = tokenizer.decode_token if tokenizer is not None else None
        self._logprobs = TokenLogprobs(decode) if p.logprobs is not None else None
        self._token_ids: list[int] = []
        self._sent = 0  # tokens in outputs already given, for deltas

    def add(self, new: NewTokens, step: StepOutput | None, now: float) -> RequestOutput | None:
        """Takes a step's tokens; an output when the request is finished or streams."""
        if new.token_ids:
            self._token_ids += new.token_ids
            self._timer.tokens(now, len(new.token_ids), self.request.first_scheduled_time)
            self._add_logprobs(new, step)
        finished = new.finish_reason is not None
        piece = self._text_piece(new, finished)
        if finished:
            self._timer.finish(now)
        elif self._kind is OutputKind.FINAL:
            return None
        return self._output(piece, new)

    def _add_logprobs(self, new: NewTokens, step: StepOutput | None) -> None:
        if self._logprobs is None:
            return
        assert step is not None and step.logprobs is not None, "a request asked for logprobs and the step has none"
        columns, k = step.logprobs, self.request.params.logprobs
        for offset, token in enumerate(new.token_ids):
            row = new.logprobs_row + offset
            self._logprobs.append(
                token,
                float(columns.sampled[row]),
                int(columns.rank[row]),
                columns.top_ids[row, :k],
                columns.top_logprobs[row, :k],
                columns.top_ranks[row, :k],
            )

    def _visible(self, ids: list[int], reason: str | None, stop_reason: object) -> list[int]:
        """`ids` without the eos or stop id that ended the request: text leaves it out."""
        ended_by_token = reason == "stop" and (stop_reason is None or isinstance(stop_reason, int))
        return ids[:-1] if ended_by_token else ids

    def _text_piece(self, new: NewTokens, finished: bool) -> str:
        if self._detokenizer is None:
            return ""
        return self._detokenizer.add(self._visible(new.token_ids, new.finish_reason, new.stop_reason), final=finished)

    def _final_text(self, new: NewTokens) -> str:
        if not self._has_text or self._tokenizer is None:
            return ""
        ids = self._visible(self._token_ids, new.finish_reason, new.stop_reason)
        return self._tokenizer.decode(ids, skip_special_tokens=self.request.params.skip_special_tokens)

    def _output(self, piece: str, new: NewTokens) -> RequestOutput:
        r, finished = self.request, new.finish_reason is not None
        ids, logprobs, text = self._token_ids, self._logprobs, piece
        if self._kind is OutputKind.DELTA:
            ids, sent = ids[self._sent :], self._sent
            logprobs = logprobs.view(sent) if logprobs is not None else None
            self._sent += len(ids)
        else:
            ids = ids[:]
            text = self._detokenizer.text if self._detokenizer is not None else self._final_text(new)
            logprobs = logprobs.view() if logprobs is not None and not finished else logprobs
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=ids,
            cumulative_logprob=self._logprobs.cumulative if self._logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
        )
        return RequestOutput(
            request_id=r.request_id,
            prompt=r.prompt,
            prompt_token_ids=r.prompt_token_ids,
            prompt_logprobs=None,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=max(r.num_cached_tokens, 0),
            metrics=self._timer.metrics if finished else self._timer.snapshot(),
            error=new.error,
        )
