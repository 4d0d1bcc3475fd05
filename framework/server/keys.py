"""API keys: a request brings one as `Authorization: Bearer KEY`, or is answered 401. An ASGI layer."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING

from framework.server.errors import ApiError, answer_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/", "/health")
"""Answered without a key: whether the server lives, and the page, which asks for a key itself."""


class ApiKeys:
    """Asks for one of `keys`.

    Digests are compared, all of them and each in constant time: how long it takes tells neither how much of a key is
    right nor how long one is.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode("ascii")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "a valid API key is needed: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
        )
        error.headers["www-authenticate"] = "Bearer"
        await answer_of(error)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(same)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
