"""Requests in, RequestOutputs out: admission, the step loop and the output side behind five methods.

This is `llm.engine`: synchronous, with one caller. The offline API, the command line and the async API drive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from framework.engine.admission import label
from framework.engine.audience import NOBODY, Audience
from framework.engine.blame import culprit
from framework.engine.home import HomeProcess
from framework.engine.output import OutputState
from framework.engine.output_thread import Made, OutputsInPlace, OutputThread
from framework.engine.siblings import SIBLING_MARK
from framework.errors import FrameworkError, KVMemoryError, PluginError, RequestError, StageError, class_and_text, shown
from framework.request import NewTokens, OneEach, OutputKind, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from framework.batch import StepOutput
    from framework.config import Config
    from framework.engine.admission import Admission
    from framework.engine.core import EngineCore
    from framework.engine.loaded import Loaded
    from framework.plugins import Registry
    from framework.request import RequestMetrics
    from framework.tokenizer import Tokenizer


_log = logging.getLogger("framework")


class Engine:
    """One model, one scheduler, one executor. `facts` are what the build chose and measured, for reports."""

    def __init__(
        self,
        config: Config,
        core: EngineCore,
        admission: Admission,
        tokenizer: Tokenizer | None,
        facts: Mapping[str, Any],
        plugins: Registry,
        loaded: Loaded,
    ) -> None:
        self.config, self.core, self.admission, self.tokenizer, self.facts = config, core, admission, tokenizer, facts
        self.plugins, self.loaded = plugins, loaded
        self._states: dict[str, OutputState] = {}
        self._streaming: set[str] = set()  # ids of those whose outputs are wanted with every step
        self._outputs: OutputsInPlace | OutputThread = OutputThread() if core.max_in_flight > 1 else OutputsInPlace()
        self._audience = NOBODY
        self._put_back: list[RequestOutput] = []
        self._broken: BaseException | None = None
        self._home = HomeProcess("engine")

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, *, asked_at: float | None = None
    ) -> None:
        """Admits one request. Raises RequestError, NotBuiltError, ValueError or TypeError; nothing has run then.

        asked_at  by `time.perf_counter`, where the request has waited to be added: its times count from there
        """
        request = self.admission.request(request_id, prompt, params)
        self._check(request, self._states)
        self._start(request, asked_at)

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
        self._refuse_if_unusable()
        request_id: Any = request.request_id
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a non-empty string, got {request_id!r}")
        if SIBLING_MARK in request_id:
            raise RequestError(
                f"request_id must not hold the character {SIBLING_MARK!r}, got {shown(request_id)}; leave it out"
            )
        if request_id in taken:
            raise RequestError(f"request_id '{request_id}' is already running; give every request an id of its own")
        self.core.check_request(request)

    def _start(self, request: Request, asked_at: float | None = None) -> None:
        """Queues a checked request; only one that is queued takes a place in the order of arrival."""
        request_id, now = request.request_id, time.perf_counter()
        if asked_at is not None:
            request.arrival_time -= now - asked_at
            now = asked_at
        state = self._states[request_id] = OutputState(request, self.tokenizer, now)
        if request.params.output_kind is not OutputKind.FINAL:
            self._streaming.add(request_id)
        try:
            self.core.add_requests(state.requests)
        except BaseException:
            self._forget(request_id)
            raise
        self.admission.count_arrival()

    def expert_counts(self) -> dict[str, list[int]]:
        """{block of a mixture of experts: tokens that each expert was given since this engine was built}; padding and
        steps that warm up are no tokens. Waits for the device. Not while a step runs."""
        return {name: experts.counts.tolist() for name, experts in self.loaded.experts.items()}

    def observe(self, label: str, observer: Any) -> None:
        """Lets an observer hear this engine alone, from now on: an object with methods of `interfaces.Observer`, and
        with `close` if it wants to be told of the engine's end. label: for the log. Not while a step runs."""
        self.core.events = self.core.events.joined(label, observer)

    def step(self) -> list[RequestOutput]:
        """Runs one step: the finished requests, and what is new of those that stream.

        When it raises, the requests that were running are aborted; those that wait run in the steps after it. A sampler
        stage that raises ends those that use it, with finish_reason `error`, and nobody else. PluginError names a third
        party's part that raised; its cause is what it raised.
        """
        self._refuse_if_unusable()
        try:
            self._tell(self.core.step(), self.core.last_output)
            if made := self._due():
                self._put_back += self._settle(made)
            if not self._states:
                self.core.drain()
        except BaseException as error:
            if not self._recover(error):
                self._name_culprit(error)
                raise
        return self.leftovers()

    def leftovers(self) -> list[RequestOutput]:
        """Outputs that were made and not returned yet: after a step that raised, those of requests that had ended."""
        outputs, self._put_back = self._put_back, []
        return outputs

    def put_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Gives back outputs that were not for this caller: the next step returns them."""
        self._put_back += outputs

    def _tell(self, new_tokens: Sequence[NewTokens], step: StepOutput | None) -> None:
        now, heard = time.perf_counter(), None
        if isinstance(new_tokens, OneEach) and self._audience.overhears(new_tokens, step, now):
            return
        if not isinstance(new_tokens, OneEach):
            told = [(self._states[new.request.parent_id], new) for new in new_tokens]
            heard = self._audience.take()
        else:
            if not self._audience.is_of(new_tokens):
                heard = self._audience.take()
                self._audience = Audience(new_tokens.requests, self._states)
            told = self._audience.hear(new_tokens, step, now)
            if self._audience.is_full:
                heard = self._audience.take()
        self._outputs.tell(told, step, now, heard)

    def _due(self) -> list[Made]:
        """Outputs to return with this step. Whoever streams reads text while the next step computes, not a step late;
        other outputs may come later, but not after the last step."""
        if self._streaming or not self.core.scheduler.has_work():
            return self._outputs.wait()
        return self._outputs.ready()

    def _settle(self, made: Sequence[Made]) -> list[RequestOutput]:
        """The outputs, once the requests that ended with them are known to have ended everywhere."""
        for one in made:
            for request_id, stop_string in one.stopped:
                self.core.stop(request_id, stop_string)
            if one.output is not None and one.output.finished:
                self._forget(one.output.request_id)
                self.core.events.emit("on_request_finished", one.state.request, one.output)
        return [one.output for one in made if one.output is not None]

    def _forget(self, request_id: str) -> None:
        del self._states[request_id]
        self._streaming.discard(request_id)
        if not self._states:
            self._audience = NOBODY  # which keeps nobody's tokens

    def _recover(self, cause: BaseException) -> bool:
        """After a failed step, whose tokens are lost: what ran ends or begins anew, and scheduler and rows agree again.

        True when the outputs of the requests that it concerns tell of the failure, and nobody else has to know.
        """
        try:
            if isinstance(cause, KVMemoryError):
                raise cause
            self._put_back += self._settle(self._outputs.wait())
            running = [s.request for s in self._states.values() if s.is_running]
            concerned = [r for r in running if isinstance(cause, StageError) and self._concerns(cause, r)]
            for request in concerned:
                ended = self._abort(request.request_id, "error", str(cause))
                self._put_back += [] if ended is None else [ended]
            if concerned:
                _log.error("%s", cause, exc_info=cause)
                self.core.restart()
            for request in running if not concerned else ():
                self._abort(request.request_id)
            self.core.drop_steps()
            return bool(concerned)
        except BaseException as failure:
            self._broken = cause
            self._states.clear()
            self._streaming.clear()
            self._audience = NOBODY
            _log.exception("the engine cannot go on after a step that failed")
            if not isinstance(failure, Exception):
                raise
            return False

    def _concerns(self, error: StageError, request: Request) -> bool:
        if error.request_id is not None:
            return error.request_id in [one.request_id for one in self._states[request.request_id].requests]
        return self.admission.uses_stage(error.stage, request.params)

    def _name_culprit(self, error: BaseException) -> None:
        who = culprit(error, self.plugins) if isinstance(error, Exception) else None
        if who is not None and not isinstance(error, FrameworkError):
            raise PluginError(f"{who} raised {class_and_text(error)}. The requests that ran are aborted") from error

    @property
    def is_usable(self) -> bool:
        """False once a step has failed past recovery."""
        return self._broken is None

    def _refuse_if_unusable(self) -> None:
        self._home.refuse_elsewhere()
        if self._broken is not None:
            raise RuntimeError(
                f"this engine stopped when a step failed ({self._broken!r}); close it and make another one"
            ) from self._broken

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now; its last output has finish_reason `abort`. None when the id is not running.

        None as well for one that has just ended otherwise: its output comes with the next step.
        """
        self._home.refuse_elsewhere()
        if not self.is_running(request_id):
            return None
        output = self._abort(request_id)
        if not self._states:
            self.core.drain()
        return output

    def end(self, request_id: str) -> list[RequestOutput]:
        """Aborts a request: outputs that were made and not returned yet, of whomever, and its last one behind them."""
        output = self.abort(request_id)
        return [*self.leftovers(), *([] if output is None else [output])]

    def _abort(self, request_id: str, reason: str = "abort", error: str | None = None) -> RequestOutput | None:
        requests = self._states[request_id].requests
        ended = [one for one in requests if self.core.abort(one.request_id) is not None]
        self._put_back += self._settle(self._outputs.wait())
        if request_id not in self._states:
            return None
        if not ended:  # it ended in a step that failed afterwards
            self._forget(request_id)
            return None
        self._tell([NewTokens(one, [], finish_reason=reason, error=error) for one in requests], None)
        outputs = self._settle(self._outputs.wait())
        assert len(outputs) == 1 and request_id not in self._states, f"{outputs} for the abort of {requests[0]}"
        return outputs[0]

    def is_running(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return isinstance(request_id, str) and request_id in self._states

    def times(self) -> list[tuple[Request, RequestMetrics]]:
        """Each request that has not ended, with its times so far, which go on changing."""
        return [(state.request, state.metrics) for state in self._states.values()]

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
        """Aborts what runs and stops the executor; in a fork, which has no part in that, it does nothing."""
        if not self._home.is_here:
            return
        try:
            for request_id in list(self._states):
                self.abort(request_id)
        finally:
            self.core.executor.stop()
            self._outputs.stop()
            self.admission.grammars.close()
            self.core.events.close()
