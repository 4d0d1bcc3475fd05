"""What HTTP clients of `serve_soak.py` ask for and how they behave: a pure function of (seed, number of the request).

Clients report what they got; whether it is right is judged elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

MANNERS = {"stream": 40, "whole": 15, "leave": 12, "vanish": 8, "grammar": 10, "bad": 10, "oversize": 5}
"""Shares of the clients: they read a stream, take a whole answer, break off amid a stream, close before any answer, ask
under a grammar, send a body that is none, or a prompt that is too long."""

VOCAB, EOS, MAX_LEN, MAX_PROMPT = 97, 96, 128, 72
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "(ab|ca){2,8}"},
    {"choice": ["abc", "bca", "cab"]},
    {"regex": "a*b+c"},
)
BAD: tuple[bytes, ...] = (
    b"",
    b"[]",
    b'{"prompt": [1',
    b'{"prompt": "\xff"}',
    b"[" * 20_000,
    b'{"prompt": [97]}',
    b'{"prompt": [1], "temperature": NaN}',
    b'{"prompt": [1], "max_tokens": -1}',
    b'{"prompt": [1], "temprature": 1}',
    b'{"prompt": [1], "stop": [""]}',
    b'{"prompt": [1], "structured_outputs": {"regex": "(("}}',
    b'{"prompt": [1], "model": "another"}',
)


@dataclass(frozen=True)
class Ask:
    """One request. patience: events that a client who leaves reads before"""

    number: int
    manner: str
    prompt: list[int]
    params: dict[str, Any]
    patience: int


@dataclass
class Got:
    """What a client has received: of each completion its ids, its text and why it ended. status 0: none was read."""

    ask: Ask
    status: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    is_done: bool = False

    def add(self, choices: list[dict[str, Any]]) -> None:
        for one in choices:
            at = one["index"]
            self.tokens.setdefault(at, []).extend(one.get("token_ids") or ())
            self.texts[at] = self.texts.get(at, "") + one["text"]
            if one["finish_reason"] is not None:
                self.reasons[at] = one["finish_reason"]


def make_ask(seed: int, number: int) -> Ask:
    random = Random(f"{seed}/{number}")
    manner = random.choices(list(MANNERS), list(MANNERS.values()))[0]
    length = MAX_LEN + random.randrange(3000) if manner == "oversize" else random.randint(1, 12)
    beginning = Random(random.randrange(6)).choices(range(EOS), k=MAX_PROMPT - 12)
    prompt = beginning[: random.randrange(MAX_PROMPT - 11)] + random.choices(range(EOS), k=length)
    params = _params(random)
    if manner == "grammar":
        params["structured_outputs"] = random.choice(GRAMMARS)
    return Ask(number, manner, prompt, params, random.randint(1, 12))


def _params(random: Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": random.randint(1, 40),
        "n": random.choices([1, 2, 3], [80, 10, 10])[0],
        "seed": random.randrange(1 << 40),
        "temperature": random.choice([0.0, 0.9]),
        **(random.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}])),
    }
    if random.random() < 0.3:
        params["stop"] = ["".join(random.choices("abc", k=4)) for _ in range(3)]
    if random.random() < 0.2:
        params["logprobs"] = random.randint(0, 5)
    return params


class Clients:
    """All of them, of one server: a pool of kept connections for the polite, a connection each for those who leave."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession, counts: Counter[str]) -> None:
        self._url, self._model = f"{url}/v1/completions", model
        self._session, self._counts = session, counts

    async def play(self, ask: Ask) -> Got:
        """Errors of the connection are what a client saw: they stand in `errors`."""
        self._counts[ask.manner] += 1
        got = Got(ask)
        try:
            await self._play(ask, got)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            got.errors.append(f"{type(error).__name__}: {error}")
        self._counts[f"status {got.status}"] += 1
        return got

    async def _play(self, ask: Ask, got: Got) -> None:
        if ask.manner == "bad":
            content = BAD[ask.number % len(BAD)]
            async with self._session.post(
                self._url, data=content, headers={"content-type": "application/json"}
            ) as answer:
                await self._read_whole(answer, got)
            return
        body = {"model": self._model, "prompt": ask.prompt, **ask.params, "return_token_ids": True}
        if ask.manner == "vanish":
            await self._vanish(body)
        elif ask.manner in ("whole", "oversize"):
            async with self._session.post(self._url, json=body) as answer:
                await self._read_whole(answer, got)
        else:
            async with self._session.post(self._url, json={**body, "stream": True}) as answer:
                await self._read_stream(answer, got)

    async def _vanish(self, body: dict[str, Any]) -> None:
        """Closes the connection some time after the request has gone out."""
        task = asyncio.ensure_future(self._session.post(self._url, json={**body, "ignore_eos": True}))
        await asyncio.wait([task], timeout=Random(body["seed"]).random() / 10)
        task.cancel()
        with suppress(asyncio.CancelledError):
            (await task).close()

    async def _read_whole(self, answer: aiohttp.ClientResponse, got: Got) -> None:
        got.status, body = answer.status, await answer.json()
        if answer.status == 200:
            got.add(body["choices"])
            got.is_done = True
        elif not body["error"]["message"]:
            got.errors.append(f"an error without a word: {body}")

    async def _read_stream(self, answer: aiohttp.ClientResponse, got: Got) -> None:
        if answer.status != 200:
            await self._read_whole(answer, got)
            return
        got.status, num_events = 200, 0
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    got.errors.append(event["error"]["message"])
                got.add(event.get("choices", []))
                num_events += 1
            got.is_done = got.is_done or line.startswith(b"data: [DONE]")
            if got.ask.manner == "leave" and num_events >= got.ask.patience:
                answer.close()
                return
