"""Requests in, RequestOutputs out: admission, the step loop and the output side behind five methods.

This is `llm.engine`: synchronous, with one caller. The offline API, the command line and the async API drive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from framework.engine.admission import label
from framework.engine.output import OutputState
from framework.errors import RequestError
from framework.request import NewTokens, Request, RequestOutput, RequestStatus, SamplingParams

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.admission import Admission
    from framework.engine.core import EngineCore
    from framework.tokenizer import Tokenizer


_log = logging.getLogger("framework")
_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


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
        self._put_back: list[RequestOutput] = []
        self._broken: BaseException | None = None

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams | None = None) -> None:
        """Admits one request. Raises RequestError, NotBuiltError, ValueError or TypeError; nothing has run then."""
        request = self.admission.request(request_id, prompt, params)
        self._check(request, self._states)
        self._start(request)

    def add_requests(
        self, request_ids: Sequence[str], prompts: Sequence[Any], params: Sequence[SamplingParams | None]
    ) -> None:
        """Admits all of them or none: every check is done before the first one is queued."""
        requests = self.admission.requests(request_ids, prompts, params)
        taken = set(self._states)
        for index, request in enumerate(requests):
            try:
                self._check(request, taken)
            except RequestError as e:
                raise RequestError(f"{label(prompts[index], index)}: {e}") from None
            taken.add(request.request_id)
        started: list[str] = []
        try:
            for request in requests:
                self._start(request)
                started.append(request.request_id)
        except BaseException:  # an observer was interrupted, or the scheduler refuses what it had passed
            for request_id in started:
                self.abort(request_id)
            raise

    def _check(self, request: Request, taken: Container[str]) -> None:
        """Raises what keeps the request from being queued; changes nothing. `taken` are ids in use."""
        self._refuse_if_broken()
        request_id: Any = request.request_id
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a non-empty string, got {request_id!r}")
        if request_id in taken:
            raise RequestError(f"request_id '{request_id}' is already running; give every request an id of its own")
        self.core.check_request(request)

    def _start(self, request: Request) -> None:
        """Queues a checked request; only one that is queued takes a place in the order of arrival."""
        request_id = request.request_id
        self._states[request_id] = OutputState(request, self.tokenizer, time.perf_counter())
        try:
            self.core.add_request(request)
        except BaseException:
            del self._states[request_id]
            self.core.abort(request_id)  # an observer was interrupted: the scheduler has it already
            raise
        self.admission.count_arrival()

    def step(self) -> list[RequestOutput]:
        """Runs one step: the finished requests, and what is new of those that stream.

        When it raises, the requests that were running are aborted; those that wait run in the steps after it.
        """
        self._refuse_if_broken()
        try:
            new_tokens = self.core.step()
        except BaseException as error:
            self._recover(error)
            raise
        now = time.perf_counter()
        outputs = [self._take(new, now) for new in new_tokens]
        earlier, self._put_back = self._put_back, []
        return earlier + [o for o in outputs if o is not None]

    def put_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Gives back outputs that were not for this caller: the next step returns them."""
        self._put_back += outputs

    def _recover(self, cause: BaseException) -> None:
        """After a failed step: its tokens are lost, so that what ran is aborted and scheduler and rows agree again."""
        running = [i for i, s in self._states.items() if s.request.status in (_RUNNING, _FINISHED)]
        try:
            for request_id in running:
                self.abort(request_id)
            self.core.drop_steps()
        except Exception:
            self._broken = cause
            self._states.clear()
            _log.exception("the engine cannot go on after a step that failed")

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"this engine stopped when a step failed ({self._broken!r}); close it and make another one"
            ) from self._broken

    def _take(self, new: NewTokens, now: float) -> RequestOutput | None:
        request_id = new.request.request_id
        state = self._states[request_id]
        output = state.add(new, self.core.last_output, now)
        if output is not None and output.finished:
            if state.must_stop:
                self.core.stop(request_id, str(output.outputs[0].stop_reason))
            del self._states[request_id]
            self.core.events.emit("on_request_finished", new.request, output)
        return output

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now; its last output has finish_reason `abort`. None when the id is not running."""
        if not self.is_running(request_id):
            return None
        request = self.core.abort(request_id)
        if request is None:  # it ended in a step that failed afterwards
            del self._states[request_id]
            return None
        ended = NewTokens(request, [], finish_reason="abort")
        return self._take(ended, time.perf_counter())

    def is_running(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._states

    def has_unfinished_requests(self) -> bool:
        return bool(self._states or self._put_back)

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
        self.core.events.close()
