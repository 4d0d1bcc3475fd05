"""What clients of the soak ask for and how they behave: a pure function of (seed, number of the request).

Clients speak to an `AsyncLLM` and report what they got; whether that is right is judged elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from model import EOS, MAX_LEN, PIECES, VOCAB

from framework import AsyncLLM, SamplingParams

MANNERS = {"read": 60, "break": 10, "cancel": 10, "abort": 10, "twin": 4, "bad": 6}
"""Shares of the clients: they read to the end, break off, are cancelled, abort by id, ask again under an id in use, or
ask for what is refused."""

BAD: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    ([], {}),
    ([VOCAB], {}),
    ([-1], {}),
    ([1.5], {}),
    ([1] * MAX_LEN, {}),
    ("\ud800", {}),
    ({"prompt_token_ids": [1], "prompt": "a"}, {}),
    ({"prompt_token_ids": [1], "priority": 3}, {}),
    ({"tokens": [1]}, {}),
    ([1], {"temperature": float("nan")}),
    ([1], {"max_tokens": 0}),
    ([1], {"logprobs": VOCAB + 1}),
    ([1], {"stop": [""]}),
    ([1], {"bad_words_token_ids": [[VOCAB]]}),
    ([1], {"min_tokens": 9, "max_tokens": 8}),
    ([1], {"stages": {"no such stage": True}}),
)

MAX_PROMPT = 72


@dataclass(frozen=True)
class Ask:
    """One request. patience: seconds, or outputs, until a client that does not read to the end loses it."""

    number: int
    manner: str
    prompt: Any
    params: dict[str, Any]
    patience: float


@dataclass
class Got:
    """What a client has received of each completion."""

    ask: Ask
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasons: list[tuple[str | None, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        return bool(self.reasons) and all(reason in ("stop", "length") for reason, _ in self.reasons)

    def add(self, output: Any) -> None:
        self.error = self.error or output.error
        completions = output.outputs
        if not self.tokens or self.ask.params["output_kind"] != "delta":
            self.tokens, self.texts = [[] for _ in completions], ["" for _ in completions]
        for i, one in enumerate(completions):
            self.tokens[i] += one.token_ids
            self.texts[i] += one.text
        self.reasons = [(one.finish_reason, one.stop_reason) for one in completions]


def make_ask(seed: int, number: int) -> Ask:
    random = Random(f"{seed}/{number}")
    manner = random.choices(list(MANNERS), list(MANNERS.values()))[0]
    if manner == "bad":
        prompt, params = random.choice(BAD)
        return Ask(number, manner, prompt, dict(params), 0.0)
    return Ask(number, manner, _prompt(random), _params(random), random.expovariate(4.0))


def _prompt(random: Random) -> list[int]:
    """One of a few beginnings, cut anywhere, and a tail of its own."""
    beginning = Random(random.randrange(6)).choices(range(EOS), k=MAX_PROMPT - 12)
    return beginning[: random.randrange(MAX_PROMPT - 11)] + random.choices(range(EOS), k=random.randint(1, 12))


def _params(random: Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": random.randint(1, 40),
        "n": random.choices([1, 2, 3], [80, 10, 10])[0],
        "seed": random.randrange(1 << 40),
        "output_kind": random.choice(["final", "cumulative", "delta"]),
        "ignore_eos": random.random() < 0.5,
        **(random.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}])),
        "temperature": random.choice([0.0, 0.9]),
    }
    if random.random() < 0.4:
        params["stop"] = ["".join(random.choices(PIECES[3:30], k=2)) for _ in range(6)]
        params["include_stop_str_in_output"] = random.random() < 0.5
    if random.random() < 0.2:
        params["stop_token_ids"] = random.sample(range(EOS), 4)
    if random.random() < 0.2:
        params["min_tokens"] = random.randint(0, params["max_tokens"])
    if random.random() < 0.2:
        params["logprobs"] = random.randint(0, 5)
    if random.random() < 0.1:
        params["prompt_logprobs"] = random.randint(0, 3)
    return params


async def serve(llm: AsyncLLM, ask: Ask, counts: Counter[str]) -> Got:
    """Plays the client. AssertionError when the engine accepts what it must refuse."""
    counts[ask.manner] += 1
    got = Got(ask)
    if ask.manner == "bad":
        assert await _is_refused(llm, ask), f"nobody refused {ask}"
    elif ask.manner == "cancel":
        task = asyncio.ensure_future(_read(llm, ask, got))
        await asyncio.wait([task], timeout=ask.patience)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    elif ask.manner == "abort":
        reading = asyncio.ensure_future(_read(llm, ask, got))
        await asyncio.wait([reading], timeout=ask.patience)
        await llm.abort(_id(ask))
        await reading
    else:
        await _read(llm, ask, got)
    counts["whole"] += got.is_whole
    counts["stopped"] += any(isinstance(stop, str) for _, stop in got.reasons)
    return got


def _id(ask: Ask) -> str:
    return f"soak-{ask.number}"


async def _read(llm: AsyncLLM, ask: Ask, got: Got) -> None:
    accepted = None
    async with aclosing(llm.generate(ask.prompt, SamplingParams(**ask.params), request_id=_id(ask))) as outputs:
        count = 0
        async for output in outputs:
            got.add(output)
            count += 1
            if ask.manner == "twin" and count == 1 and not output.finished and not await _is_refused(llm, ask):
                accepted = time.time()
            if ask.manner == "break" and count > 8 * ask.patience:
                break
    if accepted is not None:
        ended = output.metrics.arrival_time + output.metrics.e2e
        assert ended < accepted, f"request {ask.number} had {accepted - ended} s to go when its id was given away"


async def _is_refused(llm: AsyncLLM, ask: Ask) -> bool:
    try:
        params = SamplingParams(**ask.params)
        async with aclosing(llm.generate(ask.prompt, params, request_id=_id(ask))) as outputs:
            async for _ in outputs:
                break
    except (ValueError, TypeError) as error:
        assert len(str(error)) > 20, f"request {ask.number}: nobody is helped by {error!r}"
        return True
    return False
