"""A point of a load test: requests sent at their times, or so many at once, until all are answered or time is up.

It watches itself too: how late it sends, and how late its event loop wakes up. What the moments mean is `figures`'.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

    from framework.runs.bench.serve.client import Client, Outcome
    from framework.runs.bench.serve.prompts import Ask

TICK_S = 0.01


@dataclass
class Point:
    """What was measured. start, end: moments of `time.perf_counter`.

    outcomes     of the requests that ended by themselves, whole or with an error
    num_cut      requests that were under way or not sent when time was up or a signal came
    num_told     requests of whose end the caller knows
    loop_lags    seconds by which the event loop woke up late, a value a tick
    interrupt    what the caller raised in order to end it
    """

    start: float = 0.0
    end: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    num_cut: int = 0
    num_told: int = 0
    loop_lags: list[float] = field(default_factory=list)
    interrupt: KeyboardInterrupt | None = None


async def drive(
    client: Client,
    asks: Sequence[Ask],
    due: Sequence[float] | None,
    concurrency: int | None,
    max_s: float | None,
    advance: Callable[[int], Any],
) -> Point:
    """One point. due: seconds after the start, for an open loop; else `concurrency` requests are kept under way.

    advance(number of requests that have ended since) is called every few ticks and may raise KeyboardInterrupt
    """
    point = Point()
    async with client.session() as session:
        point.start = time.perf_counter()
        if due is None:
            assert concurrency is not None, "a point has moments or a concurrency"
            load = _closed(client, session, asks, concurrency, point)
        else:
            load = _open(client, session, asks, due, point)
        work = asyncio.ensure_future(load)
        watch = asyncio.ensure_future(_watch(work, point, max_s, advance))
        await asyncio.wait([work])
        watch.cancel()
        await asyncio.wait([watch])
        point.end = time.perf_counter()
    if not work.cancelled() and (fault := work.exception()):
        raise fault
    if not watch.cancelled() and (fault := watch.exception()):
        raise fault
    point.num_cut = len(asks) - len(point.outcomes)
    return point


async def _open(
    client: Client, session: aiohttp.ClientSession, asks: Sequence[Ask], due: Sequence[float], point: Point
) -> None:
    async with asyncio.TaskGroup() as group:
        for ask, moment in zip(asks, due, strict=True):
            wait = point.start + moment - time.perf_counter()
            # A sleep of nothing lets those that are under way go on.
            await asyncio.sleep(max(0.0, wait))
            group.create_task(_one(client, session, ask, point.start + moment, point))


async def _closed(
    client: Client, session: aiohttp.ClientSession, asks: Sequence[Ask], concurrency: int, point: Point
) -> None:
    left = iter(asks)

    async def worker() -> None:
        for ask in left:  # one iterator for all of them: each takes the next request
            await _one(client, session, ask, time.perf_counter(), point)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asks))):
            group.create_task(worker())


async def _one(client: Client, session: aiohttp.ClientSession, ask: Ask, due: float, point: Point) -> None:
    point.outcomes.append(await client.send(session, ask, due))


async def _watch(work: asyncio.Future[None], point: Point, max_s: float | None, advance: Callable[[int], Any]) -> None:
    """Ends the work when time is up or the caller wants it; notes how late the loop wakes up."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        point.loop_lags.append(now - before - TICK_S)
        is_over = max_s is not None and now - point.start >= max_s
        try:
            advance(len(point.outcomes) - point.num_told)
        except KeyboardInterrupt as interrupt:
            point.interrupt = interrupt
            is_over = True
        point.num_told = len(point.outcomes)
        if is_over:
            work.cancel()
            return
