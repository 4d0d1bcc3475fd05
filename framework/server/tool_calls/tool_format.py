"""A way of writing calls of tools: `ToolFormat` puts together how it is read, written in prompts, and constrained.

Which format a checkpoint has is in `choosing`.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from framework.server.tool_calls.constraint import Openings, constraint
from framework.server.tool_calls.events import ArgumentsDelta, CallStarted, Event, TextDelta, ToolCall
from framework.server.tool_calls.json_calls import JsonCalls, Layout
from framework.server.tool_calls.prompting import described, with_objects

if TYPE_CHECKING:
    from framework.request import StructuredOutputsParams

Tools = Sequence[Mapping[str, Any]]
Messages = Sequence[Mapping[str, Any]]


class ToolStream(Protocol):
    """A text read for calls as it comes. The events of `feed` and `finish` are those of the whole text, however it is
    cut."""

    def feed(self, delta: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The text has ended. Nothing is called afterwards."""


@dataclass(frozen=True)
class ToolFormat:
    """How the models of a family call tools.

    name                  as `server.tool_format` has it
    read                  makes the stream of a request with these tools
    write                 calls as the model writes them, for prompts
    openings              how a call begins and ends in the middle of a text; None: it cannot be constrained there
    keeps_special_tokens  its marks are special tokens, which a text leaves out unless the request says otherwise
    is_shown_by_us        the chat template knows no tools: they are described in a system message of ours
    id_length             None: ids are `call_` and 24 hex digits; else so many letters and digits, which the templates
                          of the family ask for
    """

    name: str
    read: Callable[[Tools], ToolStream]
    write: Callable[[Sequence[ToolCall]], str]
    openings: Openings | None = None
    keeps_special_tokens: bool = False
    is_shown_by_us: bool = False
    id_length: int | None = None

    def new_id(self) -> str:
        """Id of a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))

    def prompt(self, messages: Messages, tools: Tools) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as `apply_chat_template` takes them; None where the messages describe the tools already.

        Earlier calls and their results are shown as well. RequestError for arguments in them that are no JSON object.
        """
        if self.is_shown_by_us:
            return described(messages, tools, self.write), None
        return with_objects(messages), [dict(tool) for tool in tools]

    def constraint(self, tools: Tools, tool_choice: Any, parallel: bool = True) -> StructuredOutputsParams | None:
        """What keeps the text to calls; see `constraint.constraint`."""
        return constraint(self.name, self.openings, tools, tool_choice, parallel)

    def stream(
        self, *, forced: bool = False, tools: Tools = (), parallel: bool = True, reasoning_end: str | None = None
    ) -> ToolStream:
        """A reader of one text.

        forced         the text is calls, as `constraint` has them for a `tool_choice` that asks for one
        tools          of the request: formats without types of their own take them from there
        parallel       False: calls after the first are left out
        reasoning_end  `grammar.reasoning_end`: forced calls may stand behind it
        """
        thoughtful = Layout(reasoning_end, at_start=True, lists=True, says_begin=True)
        stream = JsonCalls(thoughtful) if forced else self.read(tools)
        return stream if parallel else _FirstCall(stream)

    def parse(
        self,
        text: str,
        *,
        forced: bool = False,
        tools: Tools = (),
        parallel: bool = True,
        reasoning_end: str | None = None,
    ) -> tuple[str | None, list[ToolCall]]:
        """(what is said, calls) of a whole text: what `stream` gives. None where calls are all there is."""
        stream = self.stream(forced=forced, tools=tools, parallel=parallel, reasoning_end=reasoning_end)
        return collected(stream.feed(text) + stream.finish())


class _FirstCall:
    """A stream without the calls after the first."""

    def __init__(self, stream: ToolStream) -> None:
        self._stream = stream

    def feed(self, delta: str) -> list[Event]:
        return _of_first(self._stream.feed(delta))

    def finish(self) -> list[Event]:
        return _of_first(self._stream.finish())


def _of_first(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, TextDelta) or event.index == 0]


def collected(events: Iterable[Event]) -> tuple[str | None, list[ToolCall]]:
    """Events of a whole text put together."""
    said, names, arguments = [], [], []
    for event in events:
        if isinstance(event, TextDelta):
            said.append(event.text)
        elif isinstance(event, CallStarted):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, ArgumentsDelta):
            arguments[event.index] += event.text
    text = "".join(said)
    return text if text or not names else None, list(map(ToolCall, names, arguments))
