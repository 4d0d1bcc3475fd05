"""`POST /v1/responses`: OpenAI's Responses API for text and functions, on top of what chats are made of.

Answers are items and typed events. A response is kept where `store` asks for it, in this process and up to a size
(`responses_store`): for `previous_response_id`, and to be read and deleted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from framework.errors import shown
from framework.request import RequestOutput, SamplingParams
from framework.server.asking import check_model, new_id
from framework.server.chat import UsedTools, params_of_chat, prompt_of_chat, tools_of
from framework.server.documented import RESPONSE
from framework.server.errors import ApiError
from framework.server.generating import Asked, Placed
from framework.server.logprobs import chat_logprobs
from framework.server.reply import Pieces, usage_of
from framework.server.responses_body import ResponsesBody
from framework.server.responses_input import messages_of, with_instructions
from framework.server.responses_output import OutputItems, message_of, tells_nobody
from framework.server.responses_store import ResponseStore, Stored
from framework.server.streaming import EventStream, WholeAnswer, dumps
from framework.server.tool_calls import Event, TextDelta, ToolStream

if TYPE_CHECKING:
    from framework.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    store = ResponseStore()

    @router.post("/v1/responses", summary="Answer, in items", responses=RESPONSE)
    async def create(body: ResponsesBody, http: Request) -> Response:
        check_model(service, body.model)
        service.check_takes_more()
        messages = messages_of(body.input, _messages_before(store, body.previous_response_id))
        chat = body.as_chat(with_instructions(messages, body.instructions))
        tools = await tools_of(service, chat)
        params = params_of_chat(service, chat, tools)
        request_id = new_id("resp", http.headers)
        asked = Asked(request_id, [await prompt_of_chat(service, chat, tools)], params)
        reply = Reply(service, body, messages, params, tools, request_id, store)
        return (
            ResponseStream(service, asked, Events(reply)) if body.stream else WholeAnswer(service, asked, reply.whole)
        )

    @router.get("/v1/responses/{response_id}", summary="A stored response")
    async def read(response_id: str) -> dict[str, Any]:
        return dict(_stored(store, response_id).body)

    @router.delete("/v1/responses/{response_id}", summary="Give up a stored response")
    async def delete(response_id: str) -> dict[str, Any]:
        _stored(store, response_id)
        store.give_up(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _stored(store: ResponseStore, response_id: str, param: str | None = None) -> Stored:
    found = store.get(response_id)
    if found is None:
        raise ApiError(
            404,
            f"there is no response {shown(response_id)} here: none is kept without store=true, and the oldest are "
            "given up when there are many",
            param=param,
            code="response_not_found",
        )
    return found


def _messages_before(store: ResponseStore, response_id: str | None) -> Sequence[Mapping[str, Any]]:
    return () if response_id is None else _stored(store, response_id, "previous_response_id").messages


class ResponseStream(EventStream):
    """Its last event says that it is the last."""

    last = ""


class Reply:
    """The JSON of one response."""

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        tools: UsedTools | None,
        request_id: str,
        store: ResponseStore,
    ) -> None:
        self.body, self.params, self.tools = body, params, tools
        self._messages, self._store = messages, store
        self._head = {"id": request_id, "object": "response", "created_at": int(time.time())}
        self._model = service.model_name

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [one] = outputs[0].outputs
        reader = self.reader()
        items = OutputItems(tells_nobody, self.new_call_id)
        items.add([*reader.feed(one.text), *reader.finish()], self.logprobs(one.token_ids, one.logprobs))
        return self.ended(items, one.finish_reason, usage_of(outputs))

    def ended(self, items: OutputItems, reason: str | None, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The finished response, which is kept if that was asked for."""
        is_whole = reason != "length"
        output = items.end(is_whole=is_whole)
        made = self.fields(
            "completed" if is_whole else "incomplete",
            completed_at=int(time.time()) if is_whole else None,
            incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
            output=output,
            usage=_usage(usage),
        )
        if self.body.store:
            self._store.keep(Stored(made, [*self._messages, message_of(output)]))
        return made

    def fields(self, status: str, **more: Any) -> dict[str, Any]:
        """The response in this state."""
        body = self.body
        return {
            **self._head,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": None,
            "store": bool(body.store),
            "temperature": self.params.temperature,
            "text": {"format": {"type": "text"} if body.format is None else body.format.told()},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def reader(self) -> ToolStream:
        return AllText() if self.tools is None else self.tools.stream()

    def new_call_id(self) -> str:
        assert self.tools is not None, "a call without tools"
        return self.tools.style.new_id()

    def logprobs(self, token_ids: Sequence[int], entries: Sequence[Any] | None) -> list[Any]:
        if not self.body.wants_logprobs:
            return []
        told = chat_logprobs(token_ids, entries or (), self.body.top_logprobs or 0)
        content: list[Any] = told["content"]
        return content


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


class AllText:
    """`ToolStream` of a request without tools."""

    def feed(self, delta: str) -> list[Event]:
        return [TextDelta(delta)] if delta else []

    def finish(self) -> list[Event]:
        return []


class Events:
    """`Writer` of a streamed response."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._pieces = Pieces(1)
        self._reader = reply.reader()
        self._items = OutputItems(self._tell, reply.new_call_id)
        self._number = 0
        self._told: list[str] = []
        self._reason: str | None = None

    def begin(self) -> str:
        for state in ("created", "in_progress"):
            self._tell(f"response.{state}", response=self._reply.fields("in_progress"))
        return self._taken()

    def write(self, placed: Sequence[Placed]) -> str:
        for piece in self._pieces.of(placed):
            events = self._reader.feed(piece.text)
            if piece.finish_reason is not None:
                events, self._reason = [*events, *self._reader.finish()], piece.finish_reason
            self._items.add(events, self._reply.logprobs(piece.token_ids, piece.logprobs))
        return self._taken()

    def end(self) -> str:
        response = self._reply.ended(self._items, self._reason, self._pieces.usage.fields())
        self._tell(f"response.{response['status']}", response=response)
        return self._taken()

    def error(self, error: ApiError) -> str:
        what = {"code": "server_error", "message": error.body()["error"]["message"]}
        self._tell("response.failed", response=self._reply.fields("failed", error=what))
        return self._taken()

    def _tell(self, kind: str, **fields: Any) -> None:
        told = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._told.append(f"event: {kind}\ndata: {dumps(told)}\n\n")

    def _taken(self) -> str:
        told, self._told = "".join(self._told), []
        return told
