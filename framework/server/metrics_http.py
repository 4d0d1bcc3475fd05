"""Counts HTTP requests by the template of their route: an ASGI middleware around the whole application.

Paths as they were typed never become labels: whoever sends requests would decide how many series there are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from framework.server.metrics_buckets import Buckets

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

NO_ROUTE, OTHER_METHOD, NO_ANSWER = "none", "other", "none"
"""Labels of a path that no route has, of a method that is none of HTTP's, and of a request that went unanswered."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class HttpSnapshot:
    """answers: {(method, route, status): requests}. latency: {(method, route): seconds to the last byte}."""

    answers: Mapping[tuple[str, str, str], int]
    latency: Mapping[tuple[str, str], Buckets]
    num_open: int


@dataclass(slots=True)
class HttpCounts:
    """Requests of one server so far."""

    num_open: int = 0
    _answers: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _latency: dict[tuple[str, str], Buckets] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        with self._lock:
            self.num_open += 1

    def end(self, method: str, route: str, status: str, seconds: float) -> None:
        with self._lock:
            self.num_open -= 1
            self._answers[method, route, status] += 1
            self._latency.setdefault((method, route), Buckets(_BOUNDS)).add(seconds)

    def read(self) -> HttpSnapshot:
        with self._lock:
            latency = {labels: buckets.copy() for labels, buckets in self._latency.items()}
            return HttpSnapshot(dict(self._answers), latency, self.num_open)


class CountRequests:
    """The application `app`, with its requests counted in `counts`.

    Layers inside of it must not copy the scope, in which routing says what route it found.
    """

    def __init__(self, app: App, counts: HttpCounts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, status = perf_counter(), NO_ANSWER

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        self._counts.begin()
        try:
            await self._app(scope, receive, watched)
        except Exception:
            if status == NO_ANSWER:
                status = "500"  # whoever called this one answers so
            raise
        finally:
            self._counts.end(_method(scope), route_of(scope), status, perf_counter() - start)


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in _METHODS else OTHER_METHOD


def route_of(scope: Scope) -> str:
    """Template of the route that took the request; routing writes it into the scope."""
    return str(getattr(scope.get("route"), "path", NO_ROUTE))
