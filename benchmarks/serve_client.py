"""A client of `serve_http.py` in a process of its own: reads what to ask from stdin, prints one JSON record.

The clock and the CPU time are the client's: what it costs to read streams is told apart from what it costs to serve.
It runs before what computes, where it may: else part of what it measures were its own waits for a core, of which a
client on a machine of its own has none.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: {place}\r\n"
    "content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
)
GOOD, EVENT, LAST_CHUNK = b"HTTP/1.1 200 ", b"data: {", b"0\r\n\r\n"


class Load:
    """Streams of completions, `concurrency` at a time, while `num_idle` more connections are open and say nothing.

    Each begins with the end of another, or a random time up to `pause_s` later. Spoken is just the HTTP of our server's
    answers: a library's client takes half a millisecond for a request, which would count as the server's. For the same
    reason requests are made before the first one is sent, and answers read when the last one has come.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.url, self.model = asked["url"], asked["model"]
        self.work: list[tuple[list[int], int]] = asked["work"]
        self.concurrency, self.num_idle = asked["concurrency"], asked.get("num_idle", 0)
        self.pause_s, self.random = asked.get("pause_s", 0.0), random.Random(0)
        self.ttft_s: list[float] = []
        self.ids: list[str] = []
        self.errors: list[str] = []
        self.num_events = self.num_tokens = 0
        self._answers: list[tuple[float, int, bytes]] = []

    async def run(self) -> dict[str, Any]:
        place = urlsplit(self.url)
        idle = [await asyncio.open_connection(place.hostname, place.port) for _ in range(self.num_idle)]
        requests = [(self._request(*one), one[1]) for one in self.work]
        cpu, start = time.process_time(), time.perf_counter()
        await self._streams(requests)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        for answer in self._answers:
            self._read(*answer)
        alive = sum([await _answers(reader, writer) for reader, writer in idle])
        return {
            "wall_s": wall_s, "client_cpu_s": cpu_s, "ttft_s": self.ttft_s, "ids": self.ids, "errors": self.errors,
            "num_tokens": self.num_tokens, "num_events": self.num_events, "num_idle_alive": alive,
        }  # fmt: skip

    def _request(self, prompt: list[int], num_tokens: int) -> bytes:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        sent = json.dumps(body).encode()
        return HEAD.format(place=urlsplit(self.url).netloc, length=len(sent)).encode() + sent

    async def _streams(self, requests: list[tuple[bytes, int]]) -> None:
        left = iter(requests)
        await asyncio.gather(*(self._worker(left) for _ in range(self.concurrency)))

    async def _worker(self, left: Iterator[tuple[bytes, int]]) -> None:
        """Streams one behind another on a connection of its own, which an error ends."""
        place, connection = urlsplit(self.url), None
        for request, num_tokens in left:
            await asyncio.sleep(self.random.uniform(0, self.pause_s))
            try:
                if connection is None:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(Connection, place.hostname, place.port)
                start = time.perf_counter()
                answer = await connection.ask(request)
                if not answer.startswith(GOOD):
                    raise RuntimeError(answer.decode())
                self._answers.append((connection.first - start, num_tokens, answer))
            except (OSError, ValueError, RuntimeError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                if connection is not None:
                    connection.transport.close()
                connection = None
        if connection is not None:
            connection.transport.close()

    def _read(self, ttft_s: float, num_tokens: int, answer: bytes) -> None:
        events = [line for line in answer.split(b"\n") if line.startswith(EVENT)]
        told = json.loads(events[-1].removeprefix(b"data: ")) if events else {}
        usage = told.get("usage")
        if usage is None or usage["completion_tokens"] != num_tokens:
            self.errors.append(f"{num_tokens} tokens were asked for, and the stream ends with {answer[-400:]!r}")
            return
        self.ttft_s.append(ttft_s)
        self.ids.append(told["id"])
        self.num_events += len(events)
        self.num_tokens += num_tokens


class Connection(asyncio.Protocol):
    """One answer at a time, kept as it comes and read when it is whole: what a client does meanwhile takes time from
    the steps that it waits for. first: when the first event came."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.first = 0.0
        self._answer = bytearray()
        self._whole: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> bytes:
        """The answer, chunks and all. ConnectionError when the connection ends before it is whole."""
        self.first, self._answer = 0.0, bytearray()
        self._whole = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._whole

    def data_received(self, data: bytes) -> None:
        if not self.first and EVENT in data:
            self.first = time.perf_counter()
        self._answer += data
        if self._answer.endswith(LAST_CHUNK) or not self._answer.startswith(GOOD[: len(self._answer)]):
            self._end(bytes(self._answer))  # an error is told as far as it has come, and no more read

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionError("the connection was closed amid an answer"))

    def _end(self, how: bytes | Exception) -> None:
        if self._whole is not None and not self._whole.done():
            if isinstance(how, Exception):
                self._whole.set_exception(how)
            else:
                self._whole.set_result(how)


async def _answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a connection that has been idle is still served."""
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: idle\r\nconnection: close\r\n\r\n")
        return (await reader.read()).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
    finally:
        writer.close()


if __name__ == "__main__":
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    print(json.dumps(asyncio.run(Load(json.load(sys.stdin)).run())))
