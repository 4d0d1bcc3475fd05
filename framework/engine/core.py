"""The step loop: schedule, execute, update. Knows requests as token ids; text is made elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from framework.engine.stats import StepStats

if TYPE_CHECKING:
    from framework.batch import SchedulerOutput, StepOutput
    from framework.interfaces import Executor, Scheduler, StepFuture
    from framework.plugins import EventBus
    from framework.request import NewTokens, Request


class EngineCore:
    """Drives one scheduler and one executor. `max_in_flight` steps may run before the first of them is waited for."""

    def __init__(self, scheduler: Scheduler, executor: Executor, events: EventBus) -> None:
        self.scheduler, self.executor, self.events = scheduler, executor, events
        self.last_step = StepStats()
        self.last_output: StepOutput | None = None  # the arrays that the last step's NewTokens point into
        self._in_flight: deque[tuple[SchedulerOutput, StepFuture, float]] = deque()

    def step(self) -> list[NewTokens]:
        """Runs one step and returns what it gave each request; [] when nothing was there to do."""
        self._submit()
        if not self._in_flight:
            return []
        scheduled, future, schedule_s = self._in_flight.popleft()
        self.last_output = output = future.result()
        start = perf_counter()
        tokens = self.scheduler.update(scheduled, output)
        self._record(scheduled, output, schedule_s, perf_counter() - start, len(tokens))
        return tokens

    def _submit(self) -> None:
        while len(self._in_flight) < self.executor.max_in_flight and self.scheduler.has_work():
            start = perf_counter()
            scheduled = self.scheduler.schedule()
            schedule_s = perf_counter() - start
            self._in_flight.append((scheduled, self.executor.execute(scheduled), schedule_s))

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)
        self.events.emit("on_request_added", request)

    def abort(self, request_id: str) -> Request | None:
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._in_flight)

    def stats(self) -> Mapping[str, int | float]:
        return self.scheduler.stats()

    def _record(
        self, scheduled: SchedulerOutput, output: StepOutput, schedule_s: float, update_s: float, num_outputs: int
    ) -> None:
        self.last_step.record(scheduled, output, schedule_s, update_s, num_outputs)
        self.events.emit("on_step_end", self.last_step)
