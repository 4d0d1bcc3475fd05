"""Messages with tools and calls as a chat template takes them. Called through `tool_format`.

Templates want the arguments of earlier calls as objects. One that knows no tools gets texts: the tools and how to call
them in a system message of ours, earlier calls as the model writes them, and results in `<tool_response>` of the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from framework.errors import RequestError, shown
from framework.server.tool_calls.events import ToolCall

Messages = Sequence[Mapping[str, Any]]
_EXAMPLE = (ToolCall("NAME", '{"PARAMETER": "value"}'),)


def with_objects(messages: Messages) -> list[dict[str, Any]]:
    """The messages, with the arguments of calls as objects."""
    return [{**m, "tool_calls": list(_calls_of(m, place))} if m.get("tool_calls") else dict(m)
            for place, m in enumerate(messages)]  # fmt: skip


def _calls_of(message: Mapping[str, Any], place: int) -> Iterable[dict[str, Any]]:
    for number, call in enumerate(message["tool_calls"]):
        function = call["function"]
        where = f"messages[{place}].tool_calls[{number}].function.arguments"
        yield {**call, "function": {**function, "arguments": _object(where, function.get("arguments"))}}


def _object(where: str, arguments: Any) -> dict[str, Any]:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise RequestError(f"{where} must be JSON of an object, got {shown(arguments)}. Correct it")
    return dict(found)


def described(
    messages: Messages, tools: Iterable[Mapping[str, Any]], write: Callable[[Sequence[ToolCall]], str]
) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools."""
    out: list[dict[str, Any]] = []
    was_result = False
    for message in with_objects(messages):
        plain, is_result = _plain(message, write), message["role"] == "tool"
        if is_result and was_result:  # templates may insist on turns that alternate
            out[-1]["content"] += "\n" + plain["content"]
        else:
            out.append(plain)
        was_result = is_result
    return _with_system(out, _instructions(tools, write))


def _plain(message: dict[str, Any], write: Callable[[Sequence[ToolCall]], str]) -> dict[str, Any]:
    """A message that has a role and a text alone, where it was a call or a result."""
    content = text_of(message.get("content"))
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = write([ToolCall(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions])
    return {"role": message["role"], "content": f"{content}\n{calls}" if content else calls}


def text_of(content: Any) -> str:
    """Text of a message's content: a string, nothing, or a list of parts."""
    if isinstance(content, str | None):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{text_of(messages[0].get('content'))}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _instructions(tools: Iterable[Mapping[str, Any]], write: Callable[[Sequence[ToolCall]], str]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, which are given as JSON with a schema of their parameters:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "Call one where it helps to answer, and write nothing else then. A call looks like this:\n"
        f"{write(_EXAMPLE)}\n"
        "The result follows in <tool_response>. Answer without a call where none is needed."
    )
