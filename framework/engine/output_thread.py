"""Where text and output objects are made: on the engine's thread, or on one of their own while the next steps compute.

Knows `OutputState`s and what steps gave them; which requests live, and what an ending means to them, is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.worker.task_thread import TaskThread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from framework.batch import StepOutput
    from framework.engine.output import OutputState
    from framework.request import NewTokens, RequestOutput


@dataclass(slots=True)
class Made:
    """An output, and the request it is of."""

    state: OutputState
    output: RequestOutput


Told = Sequence[tuple["OutputState", "NewTokens"]]


class OutputsInPlace:
    """Makes outputs on the thread that tells what there is to make."""

    def __init__(self) -> None:
        self._made: list[Made] = []

    def tell(self, told: Told, step: StepOutput | None, now: float) -> None:
        """What one step, or an abort, gave to requests. step: the arrays that it points into; now: monotonic seconds"""
        self._made += _make(told, step, now)

    def ready(self) -> list[Made]:
        """Outputs that were made and not taken yet, in the order in which they were told."""
        made, self._made = self._made, []
        return made

    def wait(self) -> list[Made]:
        """`ready`, once everything that was told is made."""
        return self.ready()

    def stop(self) -> None:
        return None


class OutputThread:
    """The same on a thread of its own."""

    def __init__(self) -> None:
        self._thread = TaskThread("framework-output")
        self._pending: list[Future[list[Made]]] = []

    def tell(self, told: Told, step: StepOutput | None, now: float) -> None:
        if told:
            self._pending.append(self._thread.submit(_make, told, step, now))

    def ready(self) -> list[Made]:
        made: list[Made] = []
        while self._pending and self._pending[0].done():
            made += self._pending.pop(0).result()
        return made

    def wait(self) -> list[Made]:
        made: list[Made] = []
        while self._pending:
            self._pending[0].exception()  # waits: an interrupt until here loses nothing
            made += self._pending.pop(0).result()
        return made

    def stop(self) -> None:
        self._thread.stop()


def _make(told: Told, step: StepOutput | None, now: float) -> list[Made]:
    pairs = [(state, state.add(new, step, now)) for state, new in told]
    return [Made(state, output) for state, output in pairs if output is not None]
