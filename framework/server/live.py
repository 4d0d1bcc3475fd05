"""`/live/events`: what the engine does, as server-sent events for whoever watches it, the page first of all.

An observer hears of each request once when it comes and once when it ends, and nothing of steps. The rest is read from
the engine between two steps, at most `FRAMES_PER_S` times a second and only while somebody listens: a step costs
nothing more for being watched.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from framework.request import RequestStatus
from framework.scheduler.kv_groups import num_held
from framework.server.errors import ApiError

if TYPE_CHECKING:
    from framework.engine.engine import Engine
    from framework.request import Request, RequestOutput
    from framework.server.service import Service

FRAMES_PER_S = 4
MAX_LISTENERS = 64
"""Streams at a time; one more is refused with 503. They count once they have begun: of a burst a few more come in."""
MAX_ROWS = 256
"""Requests that a frame shows; it says how many it leaves off."""
HISTORY = 256
"""Ended requests that somebody who comes later still hears of."""
RECENT_S = 5.0
"""Age up to which each frame names the ended ones again: who misses frames for less than that misses none of them, as
long as no more than `HISTORY` end meanwhile; `num_ended` tells."""
COLUMNS = ("id", "phase", "prompt", "computed", "output", "limit", "blocks", "cached", "preemptions", "age_s")
_PHASES = {
    RequestStatus.WAITING: "waiting", RequestStatus.PREEMPTED: "preempted", RequestStatus.LOADING: "loading",
}  # fmt: skip


class RequestWatch:
    """Which requests an engine has, and how the last ones went. Lives on the engine's thread."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._ended: deque[tuple[float, dict[str, Any]]] = deque(maxlen=HISTORY)
        self._num_ended = 0

    def on_request_added(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def on_request_finished(self, request: Request, output: RequestOutput) -> None:
        self._requests.pop(request.request_id, None)
        self._num_ended += 1
        self._ended.append((time.monotonic(), _ended(self._num_ended, request, output)))

    def history(self, engine: Engine) -> dict[str, Any]:
        """The last requests that ended, the oldest first."""
        return {"ended": [ended for _, ended in self._ended]}

    def frame(self, engine: Engine) -> dict[str, Any]:
        """What the engine does now: counters, the last step, a row for each request that has not ended."""
        counts = engine.stats()  # which also brings the requests up to date
        step, since = engine.core.last_step, time.monotonic() - RECENT_S
        requests = self._current()
        return {
            "time": time.time(),
            "stats": counts,
            "step": {
                "num_rows": step.num_rows,
                "num_prompt_tokens": step.num_prompt_tokens,
                "num_output_tokens": step.num_output_tokens,
                "seconds": {part: round(value, 6) for part, value in step.seconds.items()},
            },
            "columns": COLUMNS,
            "rows": [_row(request) for request in requests[:MAX_ROWS]],
            "num_left_off": max(len(requests) - MAX_ROWS, 0),
            "num_ended": self._num_ended,
            "ended": [ended for moment, ended in self._ended if moment >= since],
        }

    def _current(self) -> list[Request]:
        """Those that run, then those that wait. Nobody is told of requests that end with an engine that breaks."""
        each = [one for request in self._requests.values() for one in (request.siblings or (request,))]
        current = [one for one in each if one.status is not RequestStatus.FINISHED]
        return sorted(current, key=lambda one: (one.status is not RequestStatus.RUNNING, one.arrival_index))


def _row(request: Request) -> list[Any]:
    """The values of `COLUMNS`. limit: tokens at which it ends at the latest, its prompt included."""
    return [
        request.request_id,
        _PHASES.get(request.status) or ("prefill" if _is_prefill(request) else "decode"),
        request.num_prompt_tokens,
        request.num_computed_tokens,
        request.num_output_tokens,
        request.max_total_tokens,
        num_held(request.block_ids),
        max(request.num_cached_tokens, 0),
        request.num_preemptions,
        round(time.time() - request.arrival_time, 2),
    ]


def _is_prefill(request: Request) -> bool:
    """Whether known tokens, beside the last one, are still to be computed: of a prompt, or again of a resumed one."""
    return request.num_computed_tokens < max(request.num_prompt_tokens, request.num_tokens - 1)


def _ended(number: int, request: Request, output: RequestOutput) -> dict[str, Any]:
    """One ended request; times in seconds, None where there was no token. number counts them from 1."""
    metrics = output.metrics
    return {
        "number": number,
        "id": request.request_id,
        "time": time.time(),
        "prompt": request.num_prompt_tokens,
        "output": sum(one.num_output_tokens for one in (request.siblings or (request,))),
        "reason": output.outputs[0].finish_reason,
        "queue_s": metrics.queue_time,
        "ttft_s": metrics.ttft,
        "tpot_s": metrics.tpot,
        "e2e_s": metrics.e2e,
    }


class Feed:
    """Frames for all listeners. One is made when a listener that has seen the last one asks, and they share it.

    A listener asks again once its socket has taken the last frame: who is slow skips frames, and nothing is queued.
    """

    def __init__(self, service: Service) -> None:
        self.num_listeners = 0
        self._llm, self._load, self._watch = service.llm, service.load, RequestWatch()
        self._number, self._frame = 0, b""
        self._making: asyncio.Task[None] | None = None
        self._due = 0.0

    async def start(self) -> None:
        await self._llm.observe("live", self._watch)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events until the server drains: `history` once, then `frame` after `frame`."""
        self.num_listeners += 1
        try:
            yield b"retry: 1000\n" + _event("history", await self._llm.ask(self._watch.history))
            seen = 0
            while not self._load.is_draining:
                if seen == self._number or time.monotonic() >= self._due:
                    await self._next()
                seen = self._number
                yield self._frame
        finally:
            self.num_listeners -= 1

    async def _next(self) -> None:
        """Waits for the frame that is being made, and makes it where nobody does."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        await asyncio.shield(self._making)  # others wait for it as well

    async def _make(self) -> None:
        await asyncio.sleep(self._due - time.monotonic())
        state = await self._llm.ask(self._watch.frame)
        self._due = time.monotonic() + 1 / FRAMES_PER_S
        self._number, self._frame = self._number + 1, _event("frame", state)


def _event(name: str, value: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def routes(service: Service) -> APIRouter:
    feed = Feed(service)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await feed.start()
        yield

    router = APIRouter(lifespan=lifespan)

    @router.get("/live/events", include_in_schema=False)  # which has no end, and so no answer that a schema describes
    async def live_events() -> StreamingResponse:
        if feed.num_listeners >= MAX_LISTENERS:
            raise ApiError(503, f"{MAX_LISTENERS} listeners watch the engine already; close a page of it first")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers=headers)

    return router
