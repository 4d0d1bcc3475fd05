"""A stand-in for a server: it answers with known tokens after known waits, refuses fields, and breaks off on demand."""

import asyncio
import json
import threading

import pytest
from aiohttp import web

CUT, ERROR, REFUSED, NO_EVENT, NO_STREAM, NO_END = "cut", "error", "refused", "no event", "no stream", "no end"


class StandIn:
    """Listens at `url`. What it was asked is in `bodies`; `most_open` is how many requests it had at one time.

    first_s, gap_s  waits before the first chunk and between chunks
    chunk_tokens    tokens of each chunk
    refuses         fields that it answers with 400; `ids` stands for prompts of token ids
    faults          {number of the request: what is wrong with its answer}, counted from 0
    """

    def __init__(self):
        self.first_s, self.gap_s, self.chunk_tokens = 0.0, 0.0, 1
        self.refuses, self.faults, self.key, self.tells_usage = (), {}, None, True
        self.bodies, self.moments, self.num_open, self.most_open = [], [], 0, 0
        self._loop, self._stopped = asyncio.new_event_loop(), asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(started)))
        self._thread.start()
        assert started.wait(30)

    def close(self):
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self, started):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        started.set()
        await self._stopped.wait()
        await runner.cleanup()

    async def _models(self, request):
        return web.json_response({"data": [{"id": "stand-in"}]})

    async def _answer(self, request):
        body = await request.json()
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "which key?"}}, status=401)
        asked = set(body) | ({"ids"} if isinstance(body.get("prompt"), list) else set())
        if refused := sorted(asked & set(self.refuses)):
            return web.json_response({"error": {"message": f"{refused[0]} is not known here"}}, status=400)
        fault = self.faults.get(len(self.bodies))
        self.bodies.append(body)
        self.moments.append(asyncio.get_running_loop().time())
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self._stream(request, body, fault)
        finally:
            self.num_open -= 1

    async def _stream(self, request, body, fault):
        if fault == REFUSED:
            return web.json_response({"error": {"message": "come later"}}, status=429)
        if fault == NO_STREAM:
            return web.json_response({"choices": []})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b": hello\n\n")
        is_chat, total = "messages" in body, body["max_tokens"]
        if is_chat:
            await self._say(
                answer, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            )
        await asyncio.sleep(self.first_s)
        for said in range(0, total, self.chunk_tokens):
            now = min(said + self.chunk_tokens, total)
            await asyncio.sleep(self.gap_s if said else 0)
            text = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            event = {"choices": [{**text, "finish_reason": "length" if now == total else None}]}
            if body.get("stream_options", {}).get("continuous_usage_stats"):
                event["usage"] = {"prompt_tokens": 7, "completion_tokens": now}
            if fault == CUT and said:
                request.transport.abort()
                return answer
            if fault == NO_END and said:
                return answer
            if fault == ERROR and said:
                event = {"error": {"message": "the engine fell over"}}
            await self._say(answer, "{" if fault == NO_EVENT else event)
        if self.tells_usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": 3}}
            await self._say(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _say(self, answer, event):
        data = event if isinstance(event, str) else json.dumps(event)
        await answer.write(f"data: {data}\n\n".encode())


@pytest.fixture
def stand_in():
    server = StandIn()
    yield server
    server.close()
