"""Pieces of one turn of the loop go out as one, a head takes the first piece along, and nothing is lost or moved."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn

from framework.server.corked import CHUNKS, Chunks, Corked, CorkedProtocol

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Transport(asyncio.Transport):
    """Notes what would be a call of the system."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 9)})
        self.calls: list[bytes | str] = []

    def write(self, data: Any) -> None:
        self.calls.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")

    def is_closing(self) -> bool:
        return "close" in self.calls


def calls_after(use: Callable[[Corked], None]) -> tuple[list[bytes | str], list[bytes | str]]:
    """What had gone out when `use` returned, and what when the loop's turn had ended."""

    async def run() -> tuple[list[bytes | str], list[bytes | str]]:
        transport = Transport()
        use(Corked(transport, asyncio.get_running_loop()))
        at_once = list(transport.calls)
        await asyncio.sleep(0)
        return at_once, transport.calls

    return asyncio.run(run())


def written(*pieces: bytes) -> Callable[[Corked], None]:
    def use(corked: Corked) -> None:
        for piece in pieces:
            corked.write(piece)

    return use


def test_pieces_of_a_turn_are_one_call_at_its_end() -> None:
    assert calls_after(written(b"a", b"bc", b"d")) == ([], [b"abcd"])


def test_a_head_goes_with_the_first_piece_at_once() -> None:
    assert calls_after(written(HEAD, b"first", b"second", b"third")) == (
        [HEAD + b"first"], [HEAD + b"first", b"secondthird"]
    )  # fmt: skip


def test_a_head_alone_goes_when_the_turn_ends() -> None:
    assert calls_after(written(HEAD)) == ([], [HEAD])


def test_nothing_is_written_for_nothing() -> None:
    assert calls_after(written(b"", b"a", b"")) == ([], [b"a"])
    assert calls_after(written(HEAD, b"", b"first")) == ([HEAD + b"first"], [HEAD + b"first"])


def test_what_was_written_goes_before_the_end_of_a_connection() -> None:
    def use(corked: Corked) -> None:
        corked.write(b"a")
        corked.close()

    assert calls_after(use) == ([b"a", "close"], [b"a", "close"])


def test_turns_follow_each_other() -> None:
    async def run() -> list[bytes | str]:
        transport = Transport()
        corked = Corked(transport, asyncio.get_running_loop())
        for piece in (b"a", b"b", b"c"):
            corked.write(piece)
            await asyncio.sleep(0)
        return transport.calls

    assert asyncio.run(run()) == [b"a", b"b", b"c"]


def test_all_else_is_the_transport_s() -> None:
    transport = Transport()
    corked: Any = Corked(transport, cast(asyncio.AbstractEventLoop, None))
    assert corked.get_extra_info("peername") == ("10.0.0.1", 9) and not corked.is_closing()


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """Two events in two turns; the second one and the end in the same."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"two", "more_body": True})
    await send({"type": "http.response.body", "body": b"three"})


async def stream_by_chunks(scope: Any, receive: Any, send: Any) -> None:
    """The same, the second event past the layers of an application."""
    chunks: Chunks = scope["extensions"][CHUNKS]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await asyncio.sleep(0)
    assert chunks.is_free
    chunks.write(b"two")
    await send({"type": "http.response.body", "body": b"three"})


@pytest.mark.parametrize("app", [stream, stream_by_chunks])
@pytest.mark.parametrize("lets_live", [True, False])
def test_a_streamed_answer_is_two_calls(lets_live: bool, app: Any) -> None:
    async def run() -> list[bytes | str]:
        config = uvicorn.Config(app, http=CorkedProtocol, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        protocol, transport = CorkedProtocol(config, state, {}), Transport()
        protocol.connection_made(transport)
        ending = b"" if lets_live else b"connection: close\r\n"
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: here\r\n" + ending + b"\r\n")
        await asyncio.gather(*state.tasks)
        await asyncio.sleep(0)
        calls = list(transport.calls)
        protocol.connection_lost(None)
        return calls

    first, second, *rest = asyncio.run(run())
    assert isinstance(first, bytes) and first.startswith(b"HTTP/1.1 200 ") and first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert second == b"3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
    assert rest == ([] if lets_live else ["close"])


@pytest.mark.parametrize(
    ("change", "is_free"),
    [
        ({}, True),
        ({"http_version": "1.0"}, False),  # which has no chunks
        ({"method": "HEAD"}, False),  # whose answer has no content
        ({"write_paused": True}, False),
        ({"is_closing": True}, False),
    ],
)
def test_chunks_are_written_where_nothing_is_to_be_waited_for(change: dict[str, Any], is_free: bool) -> None:
    words = {"http_version": "1.1", "method": "POST", "write_paused": False, "is_closing": False, **change}
    transport: Any = SimpleNamespace(is_closing=lambda: words["is_closing"])
    flow: Any = SimpleNamespace(write_paused=words["write_paused"])
    assert Chunks(transport, flow, words).is_free is is_free


def test_an_answer_that_has_ended_leaves_nothing_for_the_collector() -> None:
    async def run() -> Any:
        config = uvicorn.Config(stream_by_chunks, http=CorkedProtocol, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        protocol, transport = CorkedProtocol(config, state, {}), Transport()
        protocol.connection_made(transport)
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        cycle = weakref.ref(protocol.cycle)
        await asyncio.gather(*state.tasks)
        await asyncio.sleep(0)
        protocol.cycle = cast(Any, None)  # as the next request's begins
        return cycle

    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()
