"""What the engine's thread tells the readers of streams in one event loop, batch by batch.

A reader awaits a queue, or takes outputs in the loop's own call (`Listener.take`), which saves its task a turn for
each. It takes them only while the loop keeps up: one that is behind would fall further behind by saying each of them,
where a reader who has a turn says in one go what has come meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from framework.request import RequestOutput

Event = RequestOutput | BaseException


@dataclass(eq=False)
class Listener:
    """Who waits for the outputs of one request: `queue` and `take` belong to the loop, and are used there alone.

    asked_at   when: the engine's thread may be amid a step then, and hears of it later
    has_begun  whether an output was handed over; the engine's thread alone reads and writes it
    take       is asked first, with the event and whether the loop is behind, and answers whether it has taken the
               event; else the queue has it. It raises nothing: others are told behind it
    """

    inbox: Inbox
    asked_at: float = field(default_factory=perf_counter)
    has_begun: bool = False
    queue: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    take: Callable[[Event, bool], bool] | None = None


Due = tuple[Listener, Event]


class Inbox:
    """Batches of events, which the engine's thread puts in and the loop hands out in the same order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._batches: deque[Sequence[Due]] = deque()
        self._is_deferred = False

    def put(self, *batches: Sequence[Due]) -> None:
        """By the engine's thread. Of the batches that wait together the newest may be taken as it comes; the others go
        to queues, whose readers have a turn before that one is handed out. RuntimeError once the loop is closed."""
        self._batches.extend(batches)
        try:
            self.loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:
            self._batches.clear()
            raise

    def _hand_out(self, is_deferred: bool = False) -> None:
        if self._is_deferred and not is_deferred:
            return  # the deferred call hands out what this one would, behind the readers' turn
        self._is_deferred = len(self._batches) > 1
        while len(self._batches) > 1:
            _tell(self._batches.popleft(), is_behind=True)
        if self._is_deferred:
            self.loop.call_soon(self._hand_out, True)
        elif self._batches:
            _tell(self._batches.popleft(), is_behind=False)


def _tell(batch: Sequence[Due], *, is_behind: bool) -> None:
    for listener, event in batch:
        if listener.take is None or not listener.take(event, is_behind):
            listener.queue.put_nowait(event)
