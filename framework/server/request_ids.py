"""`x-request-id`: the caller's own comes back with the answer, else one is made. An ASGI layer."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"


class RequestIds:
    """Gives every answer an `x-request-id`, those of errors as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        if not given:
            given = uuid.uuid4().hex.encode()
            scope = {**scope, "headers": [*scope["headers"], (HEADER, given)]}

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, given)]}
            await send(message)

        await self._app(scope, receive, with_id)
