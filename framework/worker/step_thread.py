"""Steps off the engine's thread: an executor that runs another one's steps whole, in order, on a thread of its own.

It gives `engine.async_scheduling` to an executor that takes one step at a time: the engine schedules, updates and makes
text while a step computes. The parts of a step keep the state of one step, which stays right: here they never overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from framework.worker.task_thread import TaskThread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from framework.batch import SchedulerOutput, StepOutput
    from framework.interfaces import Executor, StepFuture


class StepThread:
    """`interfaces.Executor` with two steps in flight, of which one computes and one waits for it.

    A step that fails leaves rows that the steps behind it would read: those are not run, until the engine has taken
    back every step in flight and begins anew.
    """

    max_in_flight = 2

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = TaskThread("framework-step")
        self._num_out = 0  # steps that were given and not taken back; counted by the engine's thread alone
        self._failed = False

    def start(self) -> None:
        self._thread.submit(self._executor.start).result()

    def execute(self, scheduled: SchedulerOutput) -> StepFuture:
        if not self._num_out:
            self._failed = False
        future = self._thread.submit(self._run, scheduled)
        self._num_out += 1
        return _Step(self, future)

    def _run(self, scheduled: SchedulerOutput) -> StepOutput:
        if self._failed:
            raise RuntimeError(f"step {scheduled.step_id} was not run: a step before it failed")
        try:
            return self._executor.execute(scheduled).result()
        except BaseException:
            self._failed = True
            raise

    def taken(self) -> None:
        """The engine has the result of a step."""
        self._num_out -= 1

    def broadcast(self, method: str, *args: Any) -> Sequence[Any]:
        """Between two steps: what is called may read what steps write."""
        return self._thread.submit(self._executor.broadcast, method, *args).result()

    def stop(self) -> None:
        self._thread.stop()
        self._executor.stop()


class _Step:
    """`interfaces.StepFuture` of a step in the queue of the thread."""

    __slots__ = ("_future", "_owner")

    def __init__(self, owner: StepThread, future: Future[StepOutput]) -> None:
        self._owner: StepThread | None = owner
        self._future = future

    def result(self) -> StepOutput:
        try:
            return self._future.result()
        finally:
            if self._owner is not None:
                self._owner.taken()
                self._owner = None

    def done(self) -> bool:
        return self._future.done()
