"""`POST /v1/chat/completions`: an assistant's answer, whole or streamed, as text or as calls of tools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from framework.engine.admission import Prompt
from framework.errors import shown
from framework.request import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from framework.server.asking import LONG_TEXT, check_model, new_id, params_of, with_keys
from framework.server.documented import CHAT
from framework.server.errors import ApiError
from framework.server.generating import Asked, Placed
from framework.server.lengths import check_length, refuse_long
from framework.server.logprobs import chat_logprobs, prompt_logprobs
from framework.server.messages import chat_text_of, check_tools, ids_of_chat, tool_format
from framework.server.protocol import ChatBody
from framework.server.reply import Head, Piece, Pieces, usage_of
from framework.server.streaming import EventStream, WholeAnswer, dumps, event
from framework.server.tool_calls import (
    ArgumentsDelta,
    CallStarted,
    Event,
    TextDelta,
    ToolCall,
    ToolFormat,
    ToolStream,
    collected,
    is_forced,
)

if TYPE_CHECKING:
    from framework.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer in a conversation", responses=CHAT)
    async def chat(body: ChatBody, http: Request) -> Response:
        check_model(service, body.model)
        service.check_takes_more()
        tools = await tools_of(service, body)
        params = params_of_chat(service, body, tools)
        request_id = new_id("chatcmpl", http.headers)
        asked = Asked(request_id, [await prompt_of_chat(service, body, tools)], params)
        reply = Reply(body, params, tools, request_id, service.model_name)
        return EventStream(service, asked, Events(reply)) if body.stream else WholeAnswer(service, asked, reply.whole)

    return router


@dataclass(frozen=True)
class UsedTools:
    """Tools that the model may call in one answer. reasoning_end: text behind which calls stand that are asked for."""

    style: ToolFormat
    tools: Sequence[Mapping[str, Any]]
    choice: Any
    parallel: bool
    reasoning_end: str | None = None

    @property
    def forced(self) -> bool:
        return is_forced(self.choice)

    def constraint(self) -> StructuredOutputsParams | None:
        return self.style.constraint(self.tools, self.choice, self.parallel)

    def stream(self) -> ToolStream:
        return self.style.stream(
            forced=self.forced, tools=self.tools, parallel=self.parallel, reasoning_end=self.reasoning_end
        )


async def tools_of(service: Service, body: ChatBody) -> UsedTools | None:
    """None where the answer is text alone: there are no tools, or tool_choice is `none`."""
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise ApiError(
            400, f"tool_choice={shown(choice)} must be none, auto, required, or name a function", param="tool_choice"
        )
    if choice == "none" or (not body.tools and not is_forced(choice)):
        return None
    check_tools(body.tools or ())
    style = await tool_format(service)
    if style is None:
        raise ApiError(
            400,
            "tools cannot be served: nobody knows how this model writes calls. Name one of the formats as "
            "server.tool_format",
            param="tools",
            code="not_supported",
        )
    reasoning_end = service.config.grammar.reasoning_end
    return UsedTools(style, body.tools or (), choice, body.parallel_tool_calls is not False, reasoning_end)


def params_of_chat(service: Service, body: ChatBody, tools: UsedTools | None) -> SamplingParams:
    """Without a number of tokens the answer may fill what the model has left."""
    top, most_logprobs = body.top_logprobs, service.options.max_logprobs
    if top is not None and not 0 <= top <= most_logprobs:
        raise ApiError(
            400, f"top_logprobs={top} is not in 0..{most_logprobs}, what this server allows", param="top_logprobs"
        )
    changes: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if most is not None or "max_tokens" not in service.llm.admission.defaults.named:
        changes["max_tokens"] = most
    asked = _response_format(body)
    if tools is not None and (constraint := tools.constraint()) is not None:
        if asked is not None or body.structured_outputs is not None:
            what = "response_format" if asked is not None else "structured_outputs"
            raise ApiError(
                400, f"{what} cannot go together with tools that have to be called; leave out one", param=what
            )
        asked = constraint
    if asked is not None:
        changes["structured_outputs"] = asked
    if tools is not None and tools.style.keeps_special_tokens:
        changes["skip_special_tokens"] = False
    return params_of(service, body, **changes)


def _response_format(body: ChatBody) -> StructuredOutputsParams | None:
    if body.response_format is None or body.response_format.type == "text":
        return None
    if body.response_format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    assert body.response_format.json_schema is not None, "checked with the body"
    return StructuredOutputsParams(json=body.response_format.json_schema["schema"])


async def prompt_of_chat(service: Service, body: ChatBody, tools: UsedTools | None) -> Prompt:
    def render() -> Prompt:
        text = chat_text_of(
            service,
            body.messages,
            tools=None if tools is None else tools.tools,
            style=None if tools is None else tools.style,
            generation=body.add_generation_prompt is not False,
            options=body.chat_template_kwargs,
        )
        refuse_long(service, text)
        return Prompt(ids_of_chat(service, text), text)

    is_long = len(str(body.messages)) + len(str(body.tools)) > LONG_TEXT
    made = await asyncio.get_running_loop().run_in_executor(None, render) if is_long else render()
    check_length(service, len(made.token_ids))
    return with_keys(service, made, body)


class Reply:
    """The JSON of one answer."""

    def __init__(
        self, body: ChatBody, params: SamplingParams, tools: UsedTools | None, request_id: str, model: str
    ) -> None:
        self.body, self.params, self.tools = body, params, tools
        self._head = (request_id, int(time.time()), model)

    def head(self, kind: str) -> Head:
        request_id, created, model = self._head
        return Head(request_id, kind, created, model)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        made = self.head("chat.completion").fields()
        made["choices"] = [self._choice(one) for one in output.outputs]
        made["usage"] = usage_of(outputs)
        if output.prompt_logprobs is not None and self.body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            made["prompt_token_ids"] = output.prompt_token_ids
        return made

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        calls: list[ToolCall] = []
        if self.tools is not None:
            reader = self.tools.stream()
            message["content"], calls = collected([*reader.feed(one.text), *reader.finish()])
        if calls:
            message["tool_calls"] = [
                {"id": self.call_id(), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
            ]
        made = {
            "index": one.index,
            "message": message,
            "logprobs": self.logprobs(one.token_ids, one.logprobs or ()),
            "finish_reason": ended(one.finish_reason, has_calls=bool(calls)),
            "stop_reason": one.stop_reason,
        }
        return {**made, "token_ids": one.token_ids} if self.body.return_token_ids else made

    def call_id(self) -> str:
        assert self.tools is not None, "a call without tools"
        return self.tools.style.new_id()

    def logprobs(self, token_ids: Sequence[int], entries: Sequence[Any]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        # Listed ids may be the least likely ones: nothing is left out then.
        return chat_logprobs(token_ids, entries, None if self.body.logprob_token_ids else self.body.top_logprobs or 0)


def ended(reason: str | None, *, has_calls: bool) -> str | None:
    """finish_reason: an answer that ended by itself and holds calls waits for their results."""
    return "tool_calls" if has_calls and reason == "stop" else reason


class Events:
    """`Writer` of a streamed chat."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._pieces = Pieces(reply.params.n)
        self._head = reply.head("chat.completion.chunk").fields()
        self._readers: dict[int, ToolStream] = {}
        self._has_calls: set[int] = set()
        usage = ',"usage":null' if reply.body.wants_usage_event else ""
        self._before, self._after = f'data: {dumps(self._head)[:-1]},"choices":[', f"]{usage}}}\n\n"
        self._plain_after = f'}},"logprobs":null,"finish_reason":null}}{self._after}'
        body = reply.body
        self._is_plain = not (body.logprobs or body.return_token_ids or body.prompt_logprobs is not None)
        self._is_text = reply.tools is None and self._is_plain
        self._has_told_prompt = self._is_plain

    def begin(self) -> str:
        first = {"role": "assistant", "content": ""}
        return "".join(self._event(index, first) for index in range(self._reply.params.n))

    def write(self, placed: Sequence[Placed]) -> str:
        return "".join(text for piece in self._pieces.of(placed) for text in self._of(piece))

    def _of(self, piece: Piece) -> Iterator[str]:
        if self._is_text and piece.finish_reason is None:  # what nearly every event is
            if piece.text:
                choice = f'{{"index":{piece.index},"delta":{{"content":{dumps(piece.text)}'
                yield f"{self._before}{choice}{self._plain_after}"
            return
        deltas = list(self._deltas(piece))
        more = self._beside(piece)
        if more and not deltas:
            deltas = [{"content": ""}]
        for place, delta in enumerate(deltas):
            yield self._event(piece.index, delta, **(more if place == 0 else {}))
        if piece.finish_reason is not None:
            reason = ended(piece.finish_reason, has_calls=piece.index in self._has_calls)
            yield self._event(piece.index, {}, finish_reason=reason, stop_reason=piece.stop_reason)

    def _beside(self, piece: Piece) -> dict[str, Any]:
        """What is told of a piece's tokens beside its text."""
        if self._is_plain:
            return {}
        reply, more = self._reply, dict[str, Any]()
        if reply.body.logprobs and piece.token_ids:
            more["logprobs"] = reply.logprobs(piece.token_ids, piece.logprobs or ())
        if reply.body.return_token_ids:
            more["token_ids"] = list(piece.token_ids)
        if not self._has_told_prompt:
            self._has_told_prompt = True
            if reply.body.return_token_ids:
                more["prompt_token_ids"] = list(piece.output.prompt_token_ids)
            if piece.output.prompt_logprobs is not None and reply.body.prompt_logprobs is not None:
                more["prompt_logprobs"] = prompt_logprobs(piece.output.prompt_logprobs)
        return more

    def _deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if self._reply.tools is None:
            if piece.text:
                yield {"content": piece.text}
            return
        reader = self._readers.setdefault(piece.index, self._reply.tools.stream())
        events = reader.feed(piece.text)
        if piece.finish_reason is not None:
            events = [*events, *reader.finish()]
        for one in events:
            yield self._delta(piece.index, one)

    def _delta(self, index: int, one: Event) -> dict[str, Any]:
        if isinstance(one, TextDelta):
            return {"content": one.text}
        call: dict[str, Any] = {"index": one.index}
        if isinstance(one, CallStarted):
            self._has_calls.add(index)
            call |= {"id": self._reply.call_id(), "type": "function", "function": {"name": one.name, "arguments": ""}}
        elif isinstance(one, ArgumentsDelta):
            call["function"] = {"arguments": one.text}
        return {"tool_calls": [call]}

    def _event(self, index: int, delta: Mapping[str, Any], **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return f"{self._before}{dumps(choice)}{self._after}"

    def end(self) -> str:
        if not self._reply.body.wants_usage_event:
            return ""
        return event({**self._head, "choices": [], "usage": self._pieces.usage.fields()})

    def error(self, error: ApiError) -> str:
        return event(error.body())
