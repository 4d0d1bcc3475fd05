"""The input of `/v1/responses` as messages of a chat, and its tools as those of a chat. Called by `responses`.

Items that this server cannot serve are refused with their place.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from framework.errors import did_you_mean, shown
from framework.server.errors import ApiError

_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = ("message", "function_call", "function_call_output")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_OF_TOOL = ("type", "name", "description", "parameters", "strict")


def messages_of(given: str | Sequence[Any], before: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """before: messages of the responses that this one follows."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_own(message) for message in before]
    called = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    for place, item in enumerate(items):
        _add(messages, called, f"input[{place}]", item)
    return messages


def _own(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy to which calls can be added."""
    return {**message, "tool_calls": [*message["tool_calls"]]} if "tool_calls" in message else dict(message)


def _add(messages: list[dict[str, Any]], called: set[str], where: str, item: Any) -> None:
    """called: ids of all calls so far."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        messages.append(_message(where, item))
    elif kind == "function_call":
        _add_call(messages, where, item)
        called.add(item["call_id"])
    elif kind == "function_call_output":
        messages.append(_result(called, where, item))
    else:
        near = did_you_mean(str(kind), _ITEMS)
        raise refusal(f"{where}.type", f"is {shown(kind)}; items here are {', '.join(_ITEMS)}.{near}")


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        near = did_you_mean(str(role), _ROLES)
        raise refusal(f"{where}.role", f"is {shown(role)}, and must be one of {', '.join(_ROLES)}.{near}")
    return {
        "role": "system" if role == "developer" else role,
        "content": _text(f"{where}.content", item.get("content")),
    }


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refusal(where, f"must be a text or a list of parts, got {shown(content)}")
    return "".join(_part(f"{where}[{place}]", part) for place, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise refusal(where, f"is of type {shown(kind)}; only text is served, no images, sounds or files")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise refusal(f"{where}.{_TEXTS[kind]}", f"must be a text, got {shown(text)}")
    return text


def _add_call(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Calls of one turn, and what was said before them, are one message."""
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise refusal(f"{where}.{name}", f"must be a text, got {shown(item.get(name))}")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": item["arguments"]}
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item["call_id"], "type": "function", "function": function})


def _result(called: Container[str], where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or call_id not in called:
        raise refusal(
            f"{where}.call_id", f"is {shown(call_id)}, and no function_call before it has that. Send the "
            "call as well, or previous_response_id of a stored response"
        )  # fmt: skip
    return {"role": "tool", "tool_call_id": call_id, "content": _text(f"{where}.output", item.get("output"))}


def with_instructions(messages: Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages with the system's first: templates take one, at the start."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    texts = [*([instructions] if instructions else []), *(message["content"] for message in messages[:leading])]
    first = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*first, *messages[leading:]]


def tools_of_chat(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Functions in the form of chats; other tools are refused by name."""
    return [_tool(f"tools[{place}]", tool) for place, tool in enumerate(tools)]


def _tool(where: str, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise refusal(f"{where}.type", f"is {shown(kind)}; only functions are served, which the client runs itself")
    for name in tool:
        if name not in _OF_TOOL:
            raise refusal(f"{where}.{name}", f"is not known in a tool.{did_you_mean(str(name), _OF_TOOL)}")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def choice_of_chat(choice: str | Mapping[str, Any] | None) -> Any:
    """tool_choice in the form of chats."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function":
        raise refusal("tool_choice.type", f"is {shown(choice.get('type'))}; use none, auto, required, or a function")
    return {"type": "function", "function": {"name": choice.get("name")}}


def refusal(where: str, why: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{where} {why}", param=where, code=code)
