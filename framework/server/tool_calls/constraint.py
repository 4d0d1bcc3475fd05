"""What keeps a text to calls of tools, as `structured_outputs`. Called through `tool_format`.

Where `tool_choice` asks for a call the text is bare JSON, which every grammar serves: one call as an object, and a list
of them where there may be several. Tools that are `strict` hold to their schemas in the middle of any text too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.errors import RequestError, did_you_mean, shown
from framework.request import StructuredOutputsParams


@dataclass(frozen=True)
class Openings:
    """How a call begins and ends. trigger: behind which only a call may stand; begin: with {name} for the tool's."""

    trigger: str
    begin: str
    end: str

    def of(self, name: str) -> str:
        return self.begin.replace("{name}", json.dumps(name))


def is_forced(tool_choice: Any) -> bool:
    """Whether the text has to be calls: `required`, or a function by its name."""
    return tool_choice == "required" or isinstance(tool_choice, Mapping)


def constraint(
    name: str, openings: Openings | None, tools: Sequence[Mapping[str, Any]], tool_choice: Any, parallel: bool
) -> StructuredOutputsParams | None:
    """The constraint of a request in the format `name`; None where any text will do.

    RequestError for a choice that names no tool of the request, and for strict tools that cannot be had.
    """
    functions = [tool["function"] for tool in tools]
    if isinstance(tool_choice, Mapping):
        return StructuredOutputsParams(json=_call(_chosen(functions, tool_choice)))
    if tool_choice == "required":
        if not functions:
            raise RequestError("tool_choice='required' needs tools, and there are none. Give tools, or leave it out")
        one = {"anyOf": [_call(function) for function in functions]} if len(functions) > 1 else _call(functions[0])
        return StructuredOutputsParams(json={"type": "array", "items": one, "minItems": 1} if parallel else one)
    strict = [function for function in functions if function.get("strict")]
    return _tags(name, openings, functions) if strict and tool_choice in (None, "auto") else None


def _chosen(functions: Iterable[Mapping[str, Any]], tool_choice: Mapping[str, Any]) -> Mapping[str, Any]:
    wanted = (tool_choice.get("function") or {}).get("name")
    by_name = {function["name"]: function for function in functions}
    if wanted not in by_name:
        hint = did_you_mean(str(wanted), by_name) or f" Tools: {', '.join(by_name) or 'none'}"
        raise RequestError(f"tool_choice names the function {shown(wanted)}, which is none of the tools.{hint}")
    return by_name[wanted]


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a call. The name stands first, so that the arguments stream."""
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [function["name"]]}, "arguments": _schema(function)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def _tags(name: str, openings: Openings | None, functions: Iterable[Mapping[str, Any]]) -> StructuredOutputsParams:
    """Any text, and in it calls of these tools that fit their schemas."""
    if openings is None:
        raise RequestError(
            f"tools: strict=true with tool_choice='auto' cannot be had where calls are written as {name}. "
            "Use tool_choice='required', or strict=false"
        )
    tags = [
        {"begin": openings.of(f["name"]), "content": {"type": "json_schema", "json_schema": _schema(f)},
         "end": openings.end}
        for f in functions
    ]  # fmt: skip
    form = {"type": "triggered_tags", "triggers": [openings.trigger], "tags": tags}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
