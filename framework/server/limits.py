"""How large a body may be: what is larger is answered 413 at its headers, or where its chunks pass the limit.

Of a body that is refused nothing is kept. An ASGI layer around the application.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from framework.server.errors import error_body
from framework.server.streaming import dumps

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 2.0
"""Seconds in which the rest of a refused body is taken and dropped: a client that sends would not read the answer, and
a connection that is closed on unread bytes loses it."""


class BodyTooLarge(Exception):
    """The body has passed the limit."""


class BodyLimit:
    """Refuses bodies above `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or int(length[:20]) > self._max:
            await self._refuse(receive, send)
            return
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max:
                raise BodyTooLarge
            return message

        async def unless_too_large(message: Message) -> None:
            if num_read <= self._max:  # else it is about a body that could not be read
                await send(message)

        with suppress(BodyTooLarge):
            await self._app(scope, counted, unless_too_large)
        if num_read > self._max:
            await self._refuse(receive, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        text = f"the body is above this server's limit of {self._max} bytes; shorten it, or raise server.max_body_bytes"
        body = dumps(error_body(413, text, code="body_too_large")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
