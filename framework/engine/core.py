"""The step loop: schedule, execute, update. Knows requests as token ids; text is made elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from framework.batch import StepOutput
from framework.engine.stats import StepStats
from framework.request import OneEach
from framework.worker.step_clock import ranged

if TYPE_CHECKING:
    from framework.batch import SchedulerOutput
    from framework.interfaces import Executor, Scheduler, StepFuture
    from framework.plugins import EventBus
    from framework.request import NewTokens, Request


@dataclass(slots=True)
class _Step:
    scheduled: SchedulerOutput
    start: float
    schedule_s: float
    future: StepFuture | None = None  # None until the executor has taken it


class EngineCore:
    """Drives one scheduler and one executor.

    `max_in_flight` steps, at most the executor's, may run before the first of them is waited for.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, events: EventBus, max_in_flight: int) -> None:
        assert max_in_flight <= executor.max_in_flight, (max_in_flight, executor.max_in_flight)
        self.scheduler, self.executor, self.events = scheduler, executor, events
        self.max_in_flight = max_in_flight
        self.last_step = StepStats()
        self.last_output: StepOutput | None = None  # the arrays that the last step's NewTokens point into
        self._in_flight: deque[_Step] = deque()
        self._last_end = 0.0

    def step(self) -> Sequence[NewTokens]:
        """Runs one step and returns what it gave each request; [] when nothing was there to do."""
        self._submit()
        return self._collect() if self._in_flight else []

    def drain(self) -> None:
        """Waits for the steps in flight, and for what a connector keeps, when no request is left that they could give
        anything: rows and blocks that they name are free afterwards."""
        while self.has_work():
            self.step()

    def _collect(self) -> Sequence[NewTokens]:
        """Waits for the oldest step in flight and commits it."""
        step = self._in_flight[0]
        assert step.future is not None, f"step {step.scheduled.step_id} was never taken by the executor"
        self.last_output = output = ranged("wait", step.future.result)
        start = perf_counter()
        tokens = ranged("update", self.scheduler.update, step.scheduled, output)
        self._in_flight.popleft()
        self._record(step, output, start, tokens)
        return tokens

    def _submit(self) -> None:
        while len(self._in_flight) < self.max_in_flight and self.scheduler.has_work():
            start = perf_counter()
            scheduled = ranged("schedule", self.scheduler.schedule)
            step = _Step(scheduled, start, perf_counter() - start)
            self._in_flight.append(step)
            step.future = ranged("execute", self.executor.execute, scheduled)

    def restart(self) -> None:
        """Sends every running request back to the waiting ones. The steps in flight have to be dropped next."""
        self.scheduler.restart()

    def drop_steps(self) -> None:
        """Forgets the steps in flight after one of them failed. Their requests must have been aborted or sent back."""
        while self._in_flight:
            step = self._in_flight.popleft()
            nothing = _nothing(step.scheduled)
            if step.future is not None:
                with suppress(Exception):  # its cause has been raised, or it follows from the one that was
                    nothing.connector = step.future.result().connector  # what is reported once is not lost with it
            self.scheduler.update(step.scheduled, nothing)

    def check_request(self, request: Request) -> None:
        """Raises what `add_request` would raise of the scheduler, and changes nothing."""
        self.scheduler.check_request(request)

    def add_requests(self, siblings: Sequence[Request]) -> None:
        """Queues what stands behind one request of a caller, all or nothing. Observers see the first of them."""
        added: list[Request] = []
        try:
            for request in siblings:
                self.scheduler.add_request(request)
                added.append(request)
            self.events.emit("on_request_added", siblings[0])
        except BaseException:  # an observer was interrupted, or the scheduler refuses what it had passed
            for request in added:
                self.scheduler.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> Request | None:
        return self.scheduler.abort(request_id)

    def stop(self, request_id: str, stop_string: str) -> Request | None:
        return self.scheduler.stop(request_id, stop_string)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._in_flight)

    def stats(self) -> Mapping[str, int | float]:
        return self.scheduler.stats()

    def _record(self, step: _Step, output: StepOutput, update_start: float, tokens: Sequence[NewTokens]) -> None:
        end = perf_counter()
        seconds = {"schedule": step.schedule_s, **output.timings, "update": end - update_start}
        wall_s = end - max(step.start, self._last_end)  # steps in flight overlap: no second is counted twice
        self._last_end = end
        num_output_tokens = len(tokens) if isinstance(tokens, OneEach) else sum([len(new.token_ids) for new in tokens])
        self.last_step.record(step.scheduled, num_output_tokens, seconds, wall_s)
        if self.events.has("on_step", "on_step_end"):
            # which also brings requests up to date, before an observer looks at them
            counts = self.scheduler.stats()
            self.events.emit("on_step_end", self.last_step)
            if self.events.has("on_step"):
                self.events.emit("on_step", step.scheduled, list(tokens), self.last_step, counts)


def _nothing(scheduled: SchedulerOutput) -> StepOutput:
    r = scheduled.num_rows
    return StepOutput(sampled=np.zeros((r, 1), np.int32), num_valid=np.zeros(r, np.int32), is_lost=True)
