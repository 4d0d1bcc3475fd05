"""Calls in XML found in a text as it comes: `<function=NAME><parameter=KEY>value</parameter></function>`.

What the models write that were taught Qwen3-Coder's template. A value is bare text, whose type is that of the tool's
schema, so that a call is given at once when it is whole. Called through `tool_format`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from framework.server.tool_calls.call_reader import NAME
from framework.server.tool_calls.events import Event
from framework.server.tool_calls.outgoing import Outgoing, held_back

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(rf"\s*<function=({NAME})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>\s*")


class XmlCalls:
    """`ToolStream` of the XML form. A tag whose content is not calls alone is text."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._out = Outgoing()
        self._rest = ""  # begins with BEGIN while `_is_inside`
        self._is_inside = False

    def feed(self, delta: str) -> list[Event]:
        self._rest += delta
        while self._inside() if self._is_inside else self._outside():
            pass
        return self._out.taken()

    def finish(self) -> list[Event]:
        self._out.say(self._rest)
        self._rest = ""
        return self._out.ended()

    def _outside(self) -> bool:
        before, found, behind = self._rest.partition(BEGIN)
        kept = "" if found else held_back(before, BEGIN)
        self._out.say(before[: len(before) - len(kept)])
        self._rest, self._is_inside = found + behind or kept, bool(found)
        return self._is_inside

    def _inside(self) -> bool:
        content, end, behind = self._rest[len(BEGIN) :].partition(END)
        if not end:
            return False
        self._is_inside = False
        calls = _calls_in(content)
        if calls is None:
            self._out.say(BEGIN)
            self._rest = content + end + behind
            return True
        for name, values in calls:
            self._out.begin(name)
            self._out.give(_arguments(values, self._schemas.get(name, {})))
        self._rest = behind
        return True


def _calls_in(content: str) -> list[tuple[str, dict[str, str]]] | None:
    """(name, {key: value}) of each call, None when there is none or something else as well."""
    calls: list[tuple[str, dict[str, str]]] = []
    place = 0
    while place < len(content) or not calls:
        function = _FUNCTION.match(content, place)
        if function is None:
            return None
        values: dict[str, str] = {}
        place = function.end()
        while parameter := _PARAMETER.match(content, place):
            values[parameter[1].strip()], place = parameter[2], parameter.end()
        end = _FUNCTION_END.match(content, place)
        if end is None:
            return None
        calls.append((function[1], values))
        place = end.end()
    return calls


def _arguments(values: Mapping[str, str], schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties") or {}
    return json.dumps({key: _typed(value, properties.get(key)) for key, value in values.items()})


def _typed(value: str, schema: Any) -> Any:
    """The value as JSON where its schema wants none of a string, and as text otherwise."""
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    if wanted == "string" or wanted is None:
        return value
    try:
        found = json.loads(value)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return value
    return found
