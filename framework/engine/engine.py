"""Requests in, RequestOutputs out: admission, the step loop and the output side behind five methods.

This is `llm.engine`: synchronous, with one caller. The offline API, the command line and the async API drive it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from framework.engine.output import OutputState
from framework.errors import RequestError
from framework.request import NewTokens, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.admission import Admission
    from framework.engine.core import EngineCore
    from framework.tokenizer import Tokenizer


class Engine:
    """One model, one scheduler, one executor. `facts` are what the build chose and measured, for reports."""

    def __init__(
        self,
        config: Config,
        core: EngineCore,
        admission: Admission,
        tokenizer: Tokenizer | None,
        facts: Mapping[str, Any],
    ) -> None:
        self.config, self.core, self.admission, self.tokenizer, self.facts = config, core, admission, tokenizer, facts
        self._states: dict[str, OutputState] = {}

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams | None = None) -> None:
        """Admits one request. Raises RequestError, NotBuiltError, ValueError or TypeError; nothing has run then."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a non-empty string, got {request_id!r}")
        if request_id in self._states:
            raise RequestError(f"request_id '{request_id}' is already running; give every request an id of its own")
        self._start(self.admission.request(request_id, prompt, params))

    def add_requests(
        self, request_ids: Sequence[str], prompts: Sequence[Any], params: Sequence[SamplingParams | None]
    ) -> None:
        """Admits all of them or none."""
        requests = self.admission.requests(request_ids, prompts, params)
        started: list[str] = []
        for index, request in enumerate(requests):
            try:
                self._start(request)
            except RequestError as e:
                for request_id in started:
                    self.abort(request_id)
                raise RequestError(f"prompt {index}: {e}") from None
            started.append(request.request_id)

    def _start(self, request: Request) -> None:
        state = OutputState(request, self.tokenizer, time.perf_counter())
        self.core.add_request(request)
        self._states[request.request_id] = state

    def step(self) -> list[RequestOutput]:
        """Runs one step: the finished requests, and what is new of those that stream."""
        new_tokens = self.core.step()
        now = time.perf_counter()
        outputs = (self._take(new, now) for new in new_tokens)
        return [o for o in outputs if o is not None]

    def _take(self, new: NewTokens, now: float) -> RequestOutput | None:
        request_id = new.request.request_id
        output = self._states[request_id].add(new, self.core.last_output, now)
        if output is not None and output.finished:
            del self._states[request_id]
            self.core.events.emit("on_request_finished", new.request, output)
        return output

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now; its last output has finish_reason `abort`. None when the id is not running."""
        request = self.core.abort(request_id)
        if request is None:
            return None
        ended = NewTokens(request, [], finish_reason="abort")
        return self._take(ended, time.perf_counter())

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler and the step loop; seconds by part of the step, summed over all steps."""
        s = self.core.last_step
        return {
            **self.core.stats(),
            "num_steps": s.num_steps,
            "prefill_tokens": s.total_prefill_tokens,
            "decode_tokens": s.total_decode_tokens,
            "step_seconds": dict(s.total_seconds),
        }

    def close(self) -> None:
        """Aborts what runs and stops the executor."""
        for request_id in list(self._states):
            self.abort(request_id)
        self.core.executor.stop()
