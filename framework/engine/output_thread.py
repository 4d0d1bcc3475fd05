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
    from framework.engine.audience import Heard
    from framework.engine.output import OutputState
    from framework.request import NewTokens, RequestOutput


@dataclass(slots=True)
class Made:
    """What came of a request: its output, if one is due, and what the scheduler has to end because of a stop string.

    stopped  (request id, stop string)
    """

    state: OutputState
    output: RequestOutput | None
    stopped: list[tuple[str, str]]


Told = Sequence[tuple["OutputState", "NewTokens"]]


class OutputsInPlace:
    """Makes outputs on the thread that tells what there is to make."""

    def __init__(self) -> None:
        self._made: list[Made] = []

    def tell(self, told: Told, step: StepOutput | None, now: float, heard: Heard | None = None) -> None:
        """What one step, or an abort, gave to requests. step: the arrays that it points into; now: monotonic seconds;
        heard: what steps before it gave to silent ones"""
        self._made += _make(told, step, now, heard)

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

    def tell(self, told: Told, step: StepOutput | None, now: float, heard: Heard | None = None) -> None:
        if told or heard is not None:
            self._pending.append(self._thread.submit(_make, told, step, now, heard))

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


def _make(told: Told, step: StepOutput | None, now: float, heard: Heard | None) -> list[Made]:
    if heard is not None:
        heard.tell()
    last = {state: place for place, (state, _) in enumerate(told) if state.has_siblings}
    made = []
    for place, (state, new) in enumerate(told):
        output = state.add(new, step, now, state.has_siblings and place < last[state])
        if output is not None or state.has_stopped:
            made.append(Made(state, output, state.take_stopped()))
    return made
