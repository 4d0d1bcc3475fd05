"""Answers that come from the engine: as one JSON object, or as server-sent events while it is made.

Here one HTTP request is counted, timed, and given up when its client has gone. What the JSON says is the writer's part.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from starlette.responses import Response

from framework.request import RequestOutput
from framework.server.corked import CHUNKS, Chunks
from framework.server.errors import ApiError, answer_of, as_api_error
from framework.server.generating import Asked, Placed, pieces, wholes
from framework.server.service import SHUT_DOWN, Service

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

LAST_WORD_S = 1.0
"""Seconds that a reader has for an error event after which its stream ends."""
DONE = "data: [DONE]\n\n"
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
"""What JSON lets stand, and clients that split events by Python's lines take for the end of one."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> str:
    """Compact JSON in one line. NaN and infinities are no JSON: whoever has some makes null of them before."""
    text = _encode(value)
    for mark, escape in _LINE_ENDS:
        text = text.replace(mark, escape)
    return text


def event(value: Any) -> str:
    """A server-sent event of OpenAI's kind: nothing but data."""
    return f"data: {dumps(value)}\n\n"


class Writer(Protocol):
    """The JSON of one stream, as text of server-sent events; empty where there is nothing to say."""

    def begin(self) -> str:
        """Before the first piece, which has come."""

    def write(self, placed: Sequence[Placed]) -> str:
        """What is new. Several outputs of a completion where the reader was behind: they go into one event."""

    def end(self) -> str:
        """After the last piece."""

    def error(self, error: ApiError) -> str:
        """In place of all that would follow."""


class ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer."""


class EngineAnswer(Response):
    """An answer for which the engine works. Counts against the server's limits from its first moment to its last byte.

    An error before anything was sent is an answer of its own, with its status.
    """

    def __init__(self, service: Service, asked: Asked) -> None:
        super().__init__()
        self._service, self._asked = service, asked
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        try:
            with service.load.taken(self._asked.num_completions, service.most_open):
                async with asyncio.timeout(service.options.request_timeout), until_gone(receive):
                    await self._answer(scope, receive, send)
        except ClientGone:
            return
        except asyncio.CancelledError as error:
            if SHUT_DOWN not in error.args:
                raise
            await self._fail(ApiError(503, f"{SHUT_DOWN}; ask another one", code="shutting_down"), scope, receive, send)
        except Exception as error:
            await self._fail(as_api_error(error), scope, receive, send)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._has_begun:
            await answer_of(error)(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._say_last(error, send)

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    @abstractmethod
    async def _say_last(self, error: ApiError, send: Send) -> None: ...


class WholeAnswer(EngineAnswer):
    """One JSON object: what `make` makes of the finished outputs, in the order of the prompts."""

    def __init__(
        self, service: Service, asked: Asked, make: Callable[[list[RequestOutput]], Mapping[str, Any]]
    ) -> None:
        super().__init__(service, asked)
        self._make = make

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        outputs = await wholes(self._service.llm, self._asked)
        if self._asked.params.asks_logprobs or self._asked.params.prompt_logprobs is not None:
            body = await asyncio.get_running_loop().run_in_executor(None, lambda: dumps(self._make(outputs)))
        else:
            body = dumps(self._make(outputs))
        self._has_begun = True
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _say_last(self, error: ApiError, send: Send) -> None:
        """The object is being sent: there is no place for an error in it."""


class EventStream(EngineAnswer):
    """Server-sent events. Its status is sent with the first piece: what is refused has an answer of its own.

    A reader who does not read holds up nobody: nothing is taken of the engine's stream before what was written is on
    its way, and what comes meanwhile goes out in one event. Where nothing is to be waited for, and the loop keeps up,
    events are written as the engine tells them, in the loop's own call.
    """

    last: ClassVar[str] = DONE
    """What comes behind all that the writer says."""

    def __init__(self, service: Service, asked: Asked, writer: Writer) -> None:
        super().__init__(service, asked)
        self._writer = writer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: Chunks | None = (scope.get("extensions") or {}).get(CHUNKS)
        tell = None if chunks is None else partial(self._tell, chunks)
        async with aclosing(pieces(self._service.llm, self._asked, tell)) as placed:
            async for some in placed:
                begun = "" if self._has_begun else await self._begin(send)
                if text := begun + self._writer.write(some):
                    await _say(send, text)
        await _say(send, self._writer.end() + self.last, more=False)

    def _tell(self, chunks: Chunks, some: Sequence[Placed]) -> bool:
        """As `_answer` does for what comes later, without a turn of the loop and the layers of the application."""
        if not chunks.is_free:
            return False
        if text := self._writer.write(some):
            chunks.write(text.encode())
        return True

    async def _begin(self, send: Send) -> str:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy that collects events would make one of them
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._has_begun = True
        return self._writer.begin()

    async def _say_last(self, error: ApiError, send: Send) -> None:
        await _say(send, self._writer.error(error) + self.last, more=False)


async def _say(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


@asynccontextmanager
async def until_gone(receive: Receive) -> AsyncIterator[None]:
    """Raises ClientGone inside once the client has closed its connection."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            continue
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()
