"""Pieces that are written to a connection in one turn of the event loop go out as one.

An answer is written in pieces, such as its head, an event, and the mark of its end. Each would be a call of the system,
which takes longer than the piece took to make, and wakes the reader, on cores that steps need.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD = b"HTTP/"
CHUNKS = "framework.chunks"
"""Key of a scope's extensions: with a server of another kind it is not there, and every piece goes by `send`."""


class CorkedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 over `Corked` transports. Extensions of a request's scope have its `Chunks`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        app = self.app

        async def with_chunks(scope: Any, receive: Any, send: Any) -> None:
            # what uvicorn passes for `send` is a method of the cycle that writes the answer, which nothing else names
            scope.setdefault("extensions", {})[CHUNKS] = Chunks(send.__self__)
            await app(scope, receive, send)

        self.app = with_chunks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport, self.loop))  # type: ignore[arg-type]


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

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._kept:
            self._transport.write(b"".join(self._kept))
            self._kept.clear()


class Chunks:
    """A short way for the pieces of an answer that has begun: past the layers, none of which looks at them."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._is_chunked = cycle.scope["http_version"] == "1.1" and cycle.scope["method"] != "HEAD"

    @property
    def is_free(self) -> bool:
        """Whether `write` may be called: not where the reader is behind or gone, of whom `send` knows more."""
        return self._is_chunked and not self._cycle.flow.write_paused and not self._cycle.disconnected

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
