"""Where steps run. The first executor runs them in this process, on the calling thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.batch import SchedulerOutput
    from framework.interfaces import StepFuture
    from framework.worker.model_runner import ModelRunner


class InprocessExecutor:
    """Runs every step in this process with one runner; how many may be in flight is the backend's word."""

    def __init__(self, options: Mapping[str, Any], runner: ModelRunner) -> None:
        self._runner = runner
        self.max_in_flight = runner.backend.max_in_flight

    def start(self) -> None:
        return None

    def execute(self, scheduled: SchedulerOutput) -> StepFuture:
        return self._runner.execute(scheduled)

    def broadcast(self, method: str, *args: Any) -> Sequence[Any]:
        """Calls `method` of each runner and returns the results, here one."""
        return [getattr(self._runner, method)(*args)]

    def stop(self) -> None:
        self._runner.close()
