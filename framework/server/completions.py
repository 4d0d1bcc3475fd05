"""`POST /v1/completions`: texts that go on, whole or streamed, and the prompt's own logprobs when `echo` asks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from framework.request import CompletionOutput, RequestOutput, SamplingParams
from framework.server.asking import check_model, new_id, params_of, prompt_of, prompts_of
from framework.server.documented import COMPLETION
from framework.server.errors import ApiError
from framework.server.generating import Asked, Placed
from framework.server.logprobs import CompletionLogprobs, prompt_logprobs
from framework.server.protocol import CompletionBody
from framework.server.reply import Head, Piece, Pieces, usage_of
from framework.server.streaming import EventStream, WholeAnswer, dumps, event

if TYPE_CHECKING:
    from framework.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", summary="Continue texts", responses=COMPLETION)
    async def completions(body: CompletionBody, http: Request) -> Response:
        check_model(service, body.model)
        service.check_takes_more()
        asked = Asked(new_id("cmpl", http.headers), [], _params(service, body))
        asked = Asked(asked.request_id, await _prompts(service, body, asked.params), asked.params)
        head = Head(asked.request_id, "text_completion", int(time.time()), service.model_name)
        reply = Reply(service, body, asked, head)
        return EventStream(service, asked, Events(reply)) if body.stream else WholeAnswer(service, asked, reply.whole)

    return router


def _params(service: Service, body: CompletionBody) -> SamplingParams:
    """max_tokens=0 with echo runs for one token, which is not told: the prompt's logprobs are what is wanted."""
    changes: dict[str, Any] = {}
    if body.max_tokens == 0:
        if not body.echo:
            raise ApiError(400, "max_tokens=0 needs echo=true, or nothing would be answered", param="max_tokens")
        changes["max_tokens"] = 1
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = body.logprobs
    return params_of(service, body, **changes)


async def _prompts(service: Service, body: CompletionBody, params: SamplingParams) -> list[Any]:
    prompts = prompts_of(body.prompt)
    if not prompts:
        raise ApiError(400, "prompt is an empty list; give at least one", param="prompt", code="invalid_value")
    most = service.options.max_n
    if len(prompts) * params.n > most:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n={params.n} are {len(prompts) * params.n} completions, above this server's "
            f"limit of {most}; send them in several requests",
            param="prompt",
        )
    return [await prompt_of(service, prompt, body) for prompt in prompts]


class Reply:
    """The JSON of one answer."""

    def __init__(self, service: Service, body: CompletionBody, asked: Asked, head: Head) -> None:
        self.head, self.body, self.params = head, body, asked.params
        self.tokenizer = service.llm.admission.tokenizer
        self.shows_output = body.max_tokens != 0

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        if not self.shows_output:
            for output in outputs:
                _forget_output(output)
        choices = [
            self._choice(place * self.params.n + one.index, output, one)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]
        return {**self.head.fields(), "choices": choices, "usage": usage_of(outputs)}

    def _choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        piece = Piece(index, one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason, output)
        return self.choice(piece, self.logprobs(), is_first=True)

    def choice(self, piece: Piece, logprobs: CompletionLogprobs, *, is_first: bool) -> dict[str, Any]:
        """is_first: nothing of this choice was told before, so that it begins with the prompt under echo."""
        output, with_prompt = piece.output, bool(self.body.echo) and is_first
        prompt = self.prompt_text(output) if with_prompt else ""
        made: dict[str, Any] = {"index": piece.index, "text": prompt + piece.text, "logprobs": None}
        if self.body.logprobs is not None:
            made["logprobs"] = self._logprobs(piece, logprobs, with_prompt)
        made["finish_reason"] = piece.finish_reason
        made["stop_reason"] = piece.stop_reason
        if self.body.prompt_logprobs is not None and is_first and output.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            made["token_ids"] = list(piece.token_ids)
            made["prompt_token_ids"] = list(output.prompt_token_ids) if is_first else None
        return made

    def logprobs(self) -> CompletionLogprobs:
        """Of one choice."""
        tells_others = bool(self.body.logprobs or self.params.logprob_token_ids)
        return CompletionLogprobs(self.tokenizer, tells_others=tells_others)

    def _logprobs(self, piece: Piece, logprobs: CompletionLogprobs, with_prompt: bool) -> dict[str, Any]:
        ids, entries = list(piece.token_ids), list(piece.logprobs or ())
        if with_prompt:
            assert piece.output.prompt_logprobs is not None, "echo with logprobs asks for those of the prompt"
            ids, entries = [*piece.output.prompt_token_ids, *ids], [*piece.output.prompt_logprobs, *entries]
        return logprobs.of(ids, entries)

    def prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(output.prompt_token_ids, False)


def _forget_output(output: RequestOutput) -> None:
    """What was generated only because the engine generates at least one token."""
    for one in output.outputs:
        one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason = "", [], None, "length", None


_NOTHING_MORE = '"logprobs":null,"finish_reason":null,"stop_reason":null'


class Events:
    """`Writer` of a streamed completion."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._pieces = Pieces(reply.params.n)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        fields = dumps(reply.head.fields())[:-1]
        usage = ',"usage":null' if reply.body.wants_usage_event else ""
        self._before, self._after = f'data: {fields},"choices":[', f"]{usage}}}\n\n"
        body = reply.body
        self._is_plain = body.logprobs is None and not body.return_token_ids and body.prompt_logprobs is None

    def begin(self) -> str:
        return ""

    def write(self, placed: Sequence[Placed]) -> str:
        if not self._reply.shows_output:
            for _, output in placed:
                _forget_output(output)
        return "".join(map(self._event, self._pieces.of(placed)))

    def _event(self, piece: Piece) -> str:
        is_first = piece.index not in self._logprobs
        if is_first:
            self._logprobs[piece.index] = self._reply.logprobs()
        if self._is_plain and piece.finish_reason is None and not (is_first and self._reply.body.echo):
            if not piece.text:
                return ""
            # what nearly every event is: made of it below would be the same, in more time
            return f'{self._before}{{"index":{piece.index},"text":{dumps(piece.text)},{_NOTHING_MORE}}}{self._after}'
        choice = self._reply.choice(piece, self._logprobs[piece.index], is_first=is_first)
        return f"{self._before}{dumps(choice)}{self._after}"

    def end(self) -> str:
        if not self._reply.body.wants_usage_event:
            return ""
        return event({**self._reply.head.fields(), "choices": [], "usage": self._pieces.usage.fields()})

    def error(self, error: ApiError) -> str:
        return event(error.body())
