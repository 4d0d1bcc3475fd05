"""Pieces that are written to a connection in one turn of the event loop go out as one.

An answer is written in pieces, such as its head, an event, and the mark of its end. Each would be a call of the system,
which takes longer than the piece took to make, and wakes the reader, on cores that steps need.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl

HEAD = b"HTTP/"
CHUNKS = "framework.chunks"
"""Key of a scope's extensions: with a server of another kind it is not there, and every piece goes by `send`."""


class CorkedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 over `Corked` transports. Extensions of a request's scope have its `Chunks`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        corked: Any = Corked(transport, self.loop)
        super().connection_made(corked)
        self.app = partial(_with_chunks, self.app, corked, self.flow)


async def _with_chunks(app: Any, transport: Corked, flow: FlowControl, scope: Any, receive: Any, send: Any) -> None:
    scope["extensions"] = {**(scope.get("extensions") or {}), CHUNKS: Chunks(transport, flow, scope)}
    await app(scope, receive, send)


class Corked:
    """A transport that keeps what is written until the loop's turn ends.

    The head of an answer waits for one piece only: a first event goes out before others are told what is new of theirs.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._kept: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not data:
            return
        self._kept.append(data)
        if len(self._kept) == 1:
            self._loop.call_soon(self._flush)
        elif len(self._kept) == 2 and self._kept[0].startswith(HEAD):
            self._flush()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            self._transport.write(b"".join(kept))


class Chunks:
    """A short way for the pieces of an answer that has begun: past the layers, none of which looks at them."""

    def __init__(self, transport: Corked, flow: FlowControl, scope: Any) -> None:
        self._transport, self._flow = transport, flow
        self._is_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"

    @property
    def is_free(self) -> bool:
        """Whether `write` may be called: not for an answer without chunks, of HTTP/1.0 or to HEAD, nor where the reader
        is behind or gone, of whom `send` knows more."""
        return self._is_chunked and not self._flow.write_paused and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """data: not empty, which would be the mark of an answer's end."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
