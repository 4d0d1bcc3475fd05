"""How large a body may be, and how long it may take: what is larger is answered 413 at its headers, or where its chunks
pass the limit, and one that comes to a halt 408.

Of a body that is refused nothing is kept. An ASGI layer around the application.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from framework.server.errors import error_body
from framework.server.streaming import dumps

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 2.0
"""Seconds in which the rest of a refused body is taken and dropped: a client that sends would not read the answer, and
a connection that is closed on unread bytes loses it."""

MAX_PAUSE_S = 60.0
"""Seconds between two pieces of a body: whoever sends none for longer holds a connection for nothing."""


class BodyRefused(Exception):
    """No more of the body is read. status, code and text are the answer's."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text


class BodyLimit:
    """Refuses bodies above `max_bytes`, and those that come to a halt."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or int(length[:20]) > self._max:
            await self._refuse(receive, send, self._too_large)
            return
        body = _Body(receive, self._max, self._too_large)

        async def unless_refused(message: Message) -> None:
            if body.refusal is None:  # else it is about a body that could not be read
                await send(message)

        with suppress(BodyRefused):
            await self._app(scope, body.receive, unless_refused)
        if body.refusal is not None:
            await self._refuse(receive, send, body.refusal)

    @property
    def _too_large(self) -> BodyRefused:
        text = f"the body is above this server's limit of {self._max} bytes; shorten it, or raise server.max_body_bytes"
        return BodyRefused(413, "body_too_large", text)

    async def _refuse(self, receive: Receive, send: Send, why: BodyRefused) -> None:
        body = dumps(error_body(why.status, why.text, code=why.code)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": why.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Body:
    """A body while it comes in. refusal: why no more of it is read, once that is so."""

    def __init__(self, receive: Receive, max_bytes: int, too_large: BodyRefused) -> None:
        self._receive, self._left, self._too_large = receive, max_bytes, too_large
        self._is_whole = False
        self.refusal: BodyRefused | None = None

    async def receive(self) -> Message:
        message = await self._next()
        self._left -= len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._left < 0:
            self._refuse(self._too_large)
        return message

    async def _next(self) -> Message:
        if self._is_whole:  # what is waited for now is that the client leaves
            return await self._receive()
        try:
            async with asyncio.timeout(MAX_PAUSE_S):
                return await self._receive()
        except TimeoutError:
            text = f"no more of the body has come for {MAX_PAUSE_S:g} seconds; send it again, whole"
            self._refuse(BodyRefused(408, "body_timeout", text))

    def _refuse(self, why: BodyRefused) -> NoReturn:
        self.refusal = why
        raise why


async def _drop(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
