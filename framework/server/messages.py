"""The messages of a chat as the chat template takes them, checked; tools among them as the model's format shows them.

Used by the routes for chat and responses, and by `/tokenize`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from framework.engine.admission import chat_text
from framework.engine.arguments import template_options
from framework.errors import did_you_mean, shown
from framework.server.errors import ApiError, refusing
from framework.server.tool_calls import ToolFormat, parser_for
from framework.server.tool_calls.prompting import with_objects

if TYPE_CHECKING:
    from framework.engine.aio import AsyncLLM
    from framework.server.service import Service

ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_WITHOUT_CONTENT = ("refusal", "annotations", "audio", "function_call")
"""What answers of OpenAI's carry and clients send back: taken where it is empty."""
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_formats: WeakKeyDictionary[AsyncLLM, ToolFormat | None] = WeakKeyDictionary()


async def tool_format(service: Service) -> ToolFormat | None:
    """How the served model writes calls of tools, None when nobody knows."""
    llm = service.llm
    if llm not in _formats:
        model_type = await llm.ask(lambda engine: str(engine.loaded.checkpoint.config.get("model_type", "")))
        tokenizer = llm.admission.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        _formats[llm] = parser_for(template, model_type, service.options.tool_format)
    return _formats[llm]


def chat_text_of(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    style: ToolFormat | None = None,
    generation: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as the chat template renders it. ApiError, or RequestError of the tools, name the message.

    tools       shown to the model, in the way of `style` where that is given, else by the template itself
    generation  ends where the assistant begins to speak
    options     whatever else the template reads
    """
    shown_messages: list[dict[str, Any]] = plain_messages(messages)
    shown_tools: Sequence[Mapping[str, Any]] | None = None
    if tools:
        check_tools(tools)
        shown_messages, shown_tools = (
            style.prompt(shown_messages, tools) if style is not None else (with_objects(shown_messages), tools)
        )
    else:
        shown_messages = with_objects(shown_messages)
    _check_options(options or {})
    with refusing():
        named = {**template_options(options), "tools": shown_tools, "add_generation_prompt": generation}
        return chat_text(service.llm.admission.tokenizer, shown_messages, **named)


def ids_of_chat(service: Service, text: str) -> list[int]:
    """Ids of a rendered conversation, which has all the special tokens that it needs."""
    tokenizer = service.llm.admission.tokenizer
    assert tokenizer is not None, "nothing is rendered without one"
    with refusing():
        return tokenizer.encode(text, add_special_tokens=False)


def _check_options(options: Mapping[str, Any]) -> None:
    """A client brings no template of its own: it would be a program that runs here."""
    for name, instead in (("chat_template", "the model's own is used"), ("tools", "it has a field of its own")):
        if name in options:
            raise ApiError(400, f"chat_template_kwargs must not hold '{name}'; {instead}", param="chat_template_kwargs")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is one text each. ApiError names what cannot be served, with its place."""
    return [_plain(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _plain(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        near = did_you_mean(str(role), ROLES)
        raise _refusal(f"{where}.role", f"is {shown(role)}, and must be one of {', '.join(ROLES)}.{near}")
    kept = {key: value for key, value in message.items() if value is not None and key not in ("role", "content")}
    for key in list(kept):
        if key in _WITHOUT_CONTENT and not kept[key]:
            del kept[key]
        elif key not in _KEYS:
            near = did_you_mean(str(key), _KEYS)
            raise _refusal(f"{where}.{shown(key)[1:-1]}", f"is not known in a message.{near}")
    if "tool_calls" in kept:
        _check_calls(f"{where}.tool_calls", kept["tool_calls"])
    # Templates know no developer: it is who OpenAI's newer models call the system.
    role = "system" if role == "developer" else role
    return {"role": role, "content": _text(where, message, "tool_calls" in kept), **kept}


def _text(where: str, message: Mapping[str, Any], has_calls: bool) -> str:
    content = message.get("content")
    if content is None:
        if not has_calls:
            raise _refusal(f"{where}.content", "is missing; write the text of the message")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(f"{where}.content", f"must be a text or a list of parts, got {shown(content)}")
    return "".join(_part(f"{where}.content[{place}]", part) for place, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise _refusal(where, f"must be {{'type': 'text', 'text': ...}}, got {shown(part)}")
    if part["type"] == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if part["type"] != "text":
        raise _refusal(where, f"is of type {shown(part['type'])}; only text is served, no images, sounds or files")
    if not isinstance(part.get("text"), str):
        raise _refusal(f"{where}.text", f"must be a text, got {shown(part.get('text'))}")
    return str(part["text"])


def _check_calls(where: str, calls: Any) -> None:
    if not isinstance(calls, list) or not calls:
        raise _refusal(where, "must be a list of calls; leave it out where there are none")
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refusal(f"{where}[{place}]", "must be {'id', 'type': 'function', 'function': {'name', 'arguments'}}")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """ApiError for what is no list of functions with names of their own."""
    names = set()
    for place, tool in enumerate(tools):
        where, function = f"tools[{place}]", tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise _refusal(where, "must be {'type': 'function', 'function': {'name', 'description', 'parameters'}}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise _refusal(f"{where}.function.name", f"must be a name of letters, digits, _ and -, got {shown(name)}")
        if name in names:
            raise _refusal(f"{where}.function.name", f"is '{name}', as another tool's; give each a name of its own")
        if not isinstance(parameters, Mapping | None):
            raise _refusal(f"{where}.function.parameters", f"must be a JSON Schema, got {shown(parameters)}")
        names.add(name)


def _refusal(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} {why}", param=where, code="invalid_value")
