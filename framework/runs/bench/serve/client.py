"""One request to a server, with the moments at which its answer came; and the questions asked before any is measured.

A fault of the network or of an answer ends the request that it concerns, as a kind of error, and nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import aiohttp

from framework.errors import ConfigError, class_and_text, in_one_line
from framework.runs.bench.serve.sse import EventParser
from framework.runs.bench.serve.wire import DONE, PATHS, Dialect, Heard, body_of, error_text, read_event

if TYPE_CHECKING:
    from framework.runs.bench.serve.options import LoadOptions
    from framework.runs.bench.serve.prompts import Ask

REFUSALS = (400, 404, 405, 415, 422)
"""Codes by which a server says that it does not take a field; others are troubles of its own."""


@dataclass
class Outcome:
    """What became of a request. Moments are those of `time.perf_counter`.

    due         when it was to be sent; sent: when it was
    chunks      (moment, output tokens so far or None) of each chunk with text, in their order
    first_bare  the first chunk of the answer, with text or without
    ended       the last chunk of the answer
    error       its kind, None for an answer that came whole; message: what was said about it
    """

    index: int
    due: float
    sent: float = 0.0
    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    first_bare: float | None = None
    ended: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    message: str = ""

    def hear(self, heard: Heard, moment: float) -> None:
        if heard.has_choice:
            self.first_bare = moment if self.first_bare is None else self.first_bare
            self.ended = moment
            if heard.text:
                self.chunks.append((moment, heard.output_tokens))
        for name in ("finish_reason", "prompt_tokens", "output_tokens", "cached_tokens"):
            if getattr(heard, name) is not None:
                setattr(self, name, getattr(heard, name))

    def fail(self, kind: str, message: str) -> None:
        self.error, self.message = kind, in_one_line(message)[:200]


class Client:
    """Sends requests as its options say. `dialect` and `model` are those of the server once `meet` has returned."""

    def __init__(self, options: LoadOptions, url: str, key: str | None) -> None:
        self._options, self._url = options, url.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.dialect, self.model = Dialect.wanted(options), options.model or ""

    def session(self) -> aiohttp.ClientSession:
        """As many connections as there are requests; the time limit is that of each request.

        Idle connections are given up before servers do (5 s as a rule): a request on one that is just being closed
        would be lost, and no fault of the server's.
        """
        limit = aiohttp.ClientTimeout(total=self._options.request_timeout_s, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        return aiohttp.ClientSession(connector=connector, timeout=limit, headers=self._headers)

    async def meet(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Finds out the model's name and the dialect. ConfigError for a server that cannot be measured."""
        if not self.model:
            self.model = await self._first_model(session)
        left, tried, first = [self.dialect], [], ""
        while left:
            self.dialect = left.pop(0)
            tried.append(self.dialect)
            outcome, code = await self._send(session, ask, time.perf_counter())
            if outcome.error is None:
                return
            first = first or f"{outcome.error}: {outcome.message}"
            if code not in REFUSALS:
                break
            left += [one for one in self.dialect.weaker(self._options) if one not in tried and one not in left]
        raise ConfigError(
            f"bench.url={self._url} does not answer a first request to {PATHS[self._options.api]} ({first}). "
            "Correct bench.model, bench.api or bench.token_ids, or look at the server"
        )

    async def send(self, session: aiohttp.ClientSession, ask: Ask, due: float) -> Outcome:
        return (await self._send(session, ask, due))[0]

    async def _first_model(self, session: aiohttp.ClientSession) -> str:
        try:
            async with session.get(f"{self._url}/v1/models") as answer:
                listed = await answer.json(content_type=None)
                answer.raise_for_status()
            return str(listed["data"][0]["id"])
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, TimeoutError) as error:
            raise ConfigError(
                f"bench.url={self._url} does not say which models it has at /v1/models ({class_and_text(error)}). "
                "Start the server, correct the address, or add bench.model=NAME"
            ) from None

    async def _send(self, session: aiohttp.ClientSession, ask: Ask, due: float) -> tuple[Outcome, int | None]:
        """(outcome, HTTP code or None where none came)."""
        text = json.dumps(body_of(ask, self._options, self.dialect, self.model)).encode()
        outcome, code = Outcome(ask.index, due, sent=time.perf_counter()), None
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(self._url + PATHS[self._options.api], data=text, headers=headers) as answer:
                code = answer.status
                await _listen(answer, outcome)
        except TimeoutError as error:
            outcome.fail("timeout", str(error) or f"no end within {self._options.request_timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome.fail("no connection", str(error))
        except (aiohttp.ClientError, OSError) as error:
            outcome.fail("broken stream" if code == 200 else "broken connection", class_and_text(error))
        return outcome, code


async def _listen(answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Takes the moments of a stream until it ends."""
    if answer.status != 200:
        outcome.fail(f"HTTP {answer.status}", _said(await answer.read()))
        return
    if answer.content_type != "text/event-stream":
        outcome.fail("no stream", f"the answer is {answer.content_type}")
        return
    parser, is_done = EventParser(), False
    async for piece in answer.content.iter_any():
        moment = time.perf_counter()
        for data in parser.feed(piece):
            if data == DONE:
                is_done = True
            elif not is_done and not _hear(outcome, data, moment):
                return
    if not is_done and outcome.finish_reason is None:
        outcome.fail("broken stream", "it ended before the answer did")


def _hear(outcome: Outcome, data: str, moment: float) -> bool:
    """False where the event ends the request."""
    try:
        heard = read_event(data)
    except (ValueError, AttributeError, TypeError) as error:
        outcome.fail("bad event", str(error))
        return False
    if heard.error is not None:
        outcome.fail("error in the stream", heard.error)
        return False
    outcome.hear(heard, moment)
    return True


def _said(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        return error_text(json.loads(text))
    except ValueError:
        return text[:200] or "it says nothing"


def key_from(environment: Mapping[str, str], name: str | None) -> str | None:
    """The key that the variable `name` holds. ConfigError when it holds none."""
    if name is None:
        return None
    if not environment.get(name):
        raise ConfigError(f"bench.api_key_env={name}: the environment has no such variable. Export it, or leave it out")
    return environment[name]


def cut(ask: Ask, most: int) -> Ask:
    """The same request with at most so many tokens in and out: for the first question."""
    return replace(ask, token_ids=ask.token_ids[:most], output_len=min(ask.output_len, most))
