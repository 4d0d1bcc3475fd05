"""What every route of the server has: the engine, what was configured, and what it is called. Made by `run=serve`.

A module of routes has `routes(service) -> APIRouter`; `app` puts them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework.server.errors import ApiError
from framework.server.metrics_server import ServerMetrics
from framework.server.options import ServerOptions

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.aio import AsyncLLM

BUSY_RETRY_S = 1
DRAIN_RETRY_S = 10
SHUT_DOWN = "the server is shutting down"


@dataclass
class Load:
    """What the server has taken in and not answered yet. Belongs to the event loop.

    num_open     completions of those requests
    is_draining  nothing more is taken in: the server is about to end
    """

    num_open: int = 0
    is_draining: bool = False
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)

    def check(self, num: int, most: int) -> None:
        """ApiError 503 while draining, 429 where `num` more completions would be more than `most`; what alone is more
        is taken when nothing else is open."""
        if self.is_draining:
            text = f"{SHUT_DOWN}; ask another one"
            raise ApiError(503, text, code="shutting_down", retry_after_s=DRAIN_RETRY_S)
        if self.num_open and self.num_open + num > most:
            raise ApiError(
                429,
                f"{self.num_open} completions run or wait, and {num} more are beyond the limit of {most}; try again "
                "later, or raise server.max_waiting",
                retry_after_s=BUSY_RETRY_S,
            )

    @contextmanager
    def taken(self, num: int, most: int) -> Iterator[None]:
        """Counts `num` completions while they are open. ApiError of `check`."""
        self.check(num, most)
        task = asyncio.current_task()
        assert task is not None, "requests are taken inside of a task"
        self.num_open += num
        self._tasks.add(task)
        try:
            yield
        finally:
            self.num_open -= num
            self._tasks.discard(task)

    def cancel(self) -> None:
        """Ends all that is open: its requests are aborted."""
        for task in list(self._tasks):
            task.cancel(SHUT_DOWN)


@dataclass(frozen=True)
class Service:
    """model_name: as clients ask for it. created: when the server was started, seconds since 1970. settings: every
    value with who set it, objects with key, value, source and where; empty where there was no command line."""

    llm: AsyncLLM
    config: Config
    model_name: str
    created: int
    options: ServerOptions = field(default_factory=ServerOptions)
    load: Load = field(default_factory=Load)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    settings: Sequence[Any] = ()

    @property
    def most_open(self) -> int:
        """Completions that may be open at a time: those that run, and those that may wait."""
        return self.config.scheduler.max_num_seqs + self.options.max_waiting

    def check_takes_more(self) -> None:
        """ApiError where not even one completion would be taken: before its prompt is read, which may take long."""
        self.load.check(1, self.most_open)
