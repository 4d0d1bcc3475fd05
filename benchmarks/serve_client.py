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
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp


class Load:
    """Streams of completions, `concurrency` at a time, while `num_idle` more connections are open and say nothing.

    Each begins with the end of another, or a random time up to `pause_s` later.
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
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            await asyncio.gather(*(self._worker(session, left) for _ in range(self.concurrency)))

    async def _worker(self, session: aiohttp.ClientSession, left: Any) -> None:
        for prompt, num_tokens in left:
            await asyncio.sleep(self.random.uniform(0, self.pause_s))
            try:
                await self._one(session, prompt, num_tokens)
            except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    async def _one(self, session: aiohttp.ClientSession, prompt: list[int], num_tokens: int) -> None:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        start, first, usage, name = time.perf_counter(), None, None, ""
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                self.num_events += 1
                if first is None:
                    first = time.perf_counter()
                if b'"completion_tokens"' in line:
                    last = json.loads(line[6:])
                    usage, name = last["usage"], last["id"]
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(line.decode())
        if first is None or usage is None or usage["completion_tokens"] != num_tokens:
            raise RuntimeError(f"{num_tokens} tokens were asked for, and the stream says {usage}")
        self.ttft_s.append(first - start)
        self.ids.append(name)
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
