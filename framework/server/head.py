"""HEAD wherever there is a GET: probes of load balancers ask so. An ASGI layer; the server in front sends no body."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Lets routes see a GET. Streams are left out: their headers come with a body that does not end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and not scope["path"].endswith("/events"):
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
