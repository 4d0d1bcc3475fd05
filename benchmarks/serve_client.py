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
from typing import Any
from urllib.parse import urlsplit

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: {place}\r\n"
    "content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
)


class Load:
    """Streams of completions, `concurrency` at a time, while `num_idle` more connections are open and say nothing.

    Each begins with the end of another, or a random time up to `pause_s` later. Spoken is just the HTTP of our server's
    answers: a library's client takes half a millisecond for a request, which would count as the server's.
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

    async def run(self) -> dict[str, Any]:
        place = urlsplit(self.url)
        idle = [await asyncio.open_connection(place.hostname, place.port) for _ in range(self.num_idle)]
        cpu, start = time.process_time(), time.perf_counter()
        await self._streams()
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        alive = sum([await _answers(reader, writer) for reader, writer in idle])
        return {
            "wall_s": wall_s, "client_cpu_s": cpu_s, "ttft_s": self.ttft_s, "ids": self.ids, "errors": self.errors,
            "num_tokens": self.num_tokens, "num_events": self.num_events, "num_idle_alive": alive,
        }  # fmt: skip

    async def _streams(self) -> None:
        left = iter(self.work)
        await asyncio.gather(*(self._worker(left) for _ in range(self.concurrency)))

    async def _worker(self, left: Iterator[tuple[list[int], int]]) -> None:
        """Streams one behind another on a connection of its own, which an error ends."""
        place, connection = urlsplit(self.url), None
        for prompt, num_tokens in left:
            await asyncio.sleep(self.random.uniform(0, self.pause_s))
            try:
                if connection is None:
                    connection = await asyncio.open_connection(place.hostname, place.port)
                await self._one(*connection, prompt, num_tokens)
            except (OSError, EOFError, ValueError, RuntimeError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                if connection is not None:
                    connection[1].close()
                connection = None
        if connection is not None:
            connection[1].close()

    async def _one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: list[int], num_tokens: int
    ) -> None:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        start, first, last = time.perf_counter(), None, b""
        sent = json.dumps(body).encode()
        writer.write(HEAD.format(place=urlsplit(self.url).netloc, length=len(sent)).encode() + sent)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(head.decode() + (await reader.read(4096)).decode())
        while (line := await reader.readuntil(b"\n")) != b"0\r\n":  # the chunk without content ends the answer
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                self.num_events, last = self.num_events + 1, line
        await reader.readuntil(b"\r\n")
        told = json.loads(last.removeprefix(b"data: ") or "{}")
        usage = told.get("usage")
        if first is None or usage is None or usage["completion_tokens"] != num_tokens:
            raise RuntimeError(f"{num_tokens} tokens were asked for, and the stream ends with {last.decode()!r}")
        self.ttft_s.append(first - start)
        self.ids.append(told["id"])
        self.num_tokens += num_tokens


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
