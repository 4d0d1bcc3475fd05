"""The output of `/v1/responses`: items, made piece by piece, and the events that tell of them.

A whole answer is the same items without the events. Called by `responses`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from framework.server.tool_calls import ArgumentsDelta, CallStarted, Event

Tell = Callable[..., None]


class OutputItems:
    """Items of one response, in the order in which they were written.

    tell         gets (type of an event, its fields) as things happen
    new_call_id  makes the id of a call

    At most one item is open: the last.
    """

    def __init__(self, tell: Tell, new_call_id: Callable[[], str]) -> None:
        self._tell, self._new_call_id = tell, new_call_id
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._new_logprobs: list[Any] = []

    def add(self, events: Iterable[Event], logprobs: Iterable[Any] = ()) -> None:
        """logprobs: of the tokens behind these events; they go with the text that comes next."""
        self._new_logprobs += logprobs
        for event in events:
            if isinstance(event, CallStarted):
                self._begin_call(event.name)
            elif isinstance(event, ArgumentsDelta):
                self._more_arguments(event.text)
            else:
                self._more_text(event.text)

    def end(self, *, is_whole: bool) -> list[dict[str, Any]]:
        """The items. is_whole: the last one ended by itself. There is a message, be it empty, if there is nothing."""
        if not self._items:
            self._begin_message()
        self._close("completed" if is_whole else "incomplete")
        return self._items

    def _more_text(self, text: str) -> None:
        if not (self._is_open and self._items[-1]["type"] == "message"):
            self._close()
            self._begin_message()
        part, new = self._items[-1]["content"][0], self._new_logprobs
        part["text"] += text
        part["logprobs"] += new
        self._new_logprobs = []
        self._tell("response.output_text.delta", **self._place(0), delta=text, logprobs=new)

    def _more_arguments(self, text: str) -> None:
        self._items[-1]["arguments"] += text
        self._tell("response.function_call_arguments.delta", **self._place(), delta=text)

    def _begin_message(self) -> None:
        item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": "in_progress"}
        self._begin({**item, "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._tell("response.content_part.added", **self._place(0), part=part)
        self._items[-1]["content"] = [{**part, "logprobs": []}]

    def _begin_call(self, name: str) -> None:
        self._close()
        call_id = self._new_call_id()
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        self._begin({**item, "call_id": call_id, "name": name, "arguments": ""})

    def _begin(self, item: dict[str, Any]) -> None:
        self._items.append(item)
        self._is_open = True
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _close(self, status: str = "completed") -> None:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._new_logprobs
            self._new_logprobs = []
            self._tell("response.output_text.done", **self._place(0), text=part["text"], logprobs=part["logprobs"])
            self._tell("response.content_part.done", **self._place(0), part=part)
        else:
            self._tell("response.function_call_arguments.done", **self._place(), arguments=item["arguments"])
        item["status"] = status
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if content_index is None else {**place, "content_index": content_index}


def tells_nobody(kind: str, **fields: Any) -> None:
    """`Tell` of an answer that is not streamed."""


def message_of(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The items as one message of a chat, for a response that follows."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        if item["type"] == "message":
            message["content"] += item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message["tool_calls"] = [*message.get("tool_calls", ()), call]
    return message
