"""Which format a checkpoint writes calls of tools in: by its chat template, then by its model_type, or by name.

The formats, one entry each: to add one is to describe it here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from framework.errors import no_such_choice
from framework.server.tool_calls import xml_calls
from framework.server.tool_calls.constraint import Openings
from framework.server.tool_calls.events import ToolCall
from framework.server.tool_calls.json_calls import JsonCalls, Layout
from framework.server.tool_calls.tool_format import ToolFormat, Tools, ToolStream


def _json(call: ToolCall, arguments: str = "arguments") -> str:
    return f'{{"name": {json.dumps(call.name)}, "{arguments}": {call.arguments}}}'


def _tagged(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)


def _separated(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_json(call, "parameters") for call in calls)


def _listed(calls: Sequence[ToolCall]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(_json, calls))}]"


def _in_xml(calls: Sequence[ToolCall]) -> str:
    return "\n".join(map(_xml, calls))


def _xml(call: ToolCall) -> str:
    values: dict[str, Any] = json.loads(call.arguments)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _reading(layout: Layout) -> Callable[[Tools], ToolStream]:
    return lambda _: JsonCalls(layout)


FORMATS = {
    one.name: one
    for one in (
        # Qwen2.5, Qwen3, Hermes, SmolLM2 (a list in the tags), SmolLM3
        ToolFormat(
            "hermes",
            _reading(Layout("<tool_call>", end="</tool_call>", lists=True)),
            _tagged,
            openings=Openings("<tool_call>", '<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>"),
        ),
        # Llama 3.1, 3.2, 3.3
        ToolFormat(
            "llama3_json",
            _reading(Layout("<|python_tag|>", at_start=True, separator=";")),
            _separated,
            openings=Openings('{"name": ', '{"name": {name}, "parameters": ', "}"),
            keeps_special_tokens=True,
        ),
        # Mistral 7B v0.3, Nemo, Small (lists), and from Small 3.2 on (names)
        ToolFormat(
            "mistral",
            _reading(Layout("[TOOL_CALLS]", at_start=True, lists=True, named=True)),
            _listed,
            keeps_special_tokens=True,
            id_length=9,
        ),
        # Qwen3-Coder
        ToolFormat("qwen_xml", xml_calls.XmlCalls, _in_xml),
    )
}

_SIGNS = (
    ("qwen_xml", re.compile(r"<function=.*<parameter=", re.DOTALL)),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("hermes", re.compile(r"\A(?!.*<arg_key>).*<tool_call>", re.DOTALL)),  # GLM has other things in the same tags
    ("llama3_json", re.compile(r'<\|python_tag\|>|"parameters": dictionary')),
)
"""What a template has in it that shows calls in a format, the surest first."""
_BY_MODEL_TYPE = {
    "qwen2": "hermes", "qwen2_moe": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes", "smollm3": "hermes",
    "mistral": "mistral", "mixtral": "mistral", "mistral3": "mistral", "ministral": "mistral",
}  # fmt: skip


def parser_for(template: str | None, model_type: str, name: str | None = None) -> ToolFormat | None:
    """The format of a checkpoint, None when it has no chat template or its template shows calls in none we know.

    template    its chat template, None when it has none
    model_type  of its config.json
    name        a format by its name, over both; ConfigError when there is no such one
    A template that knows no tools gets them in a system message: calls are then in `hermes`, or in the one named.
    """
    if name is not None and name not in FORMATS:
        raise no_such_choice("server.tool_format", name, FORMATS)
    if template is None:
        return None
    knows_tools = re.search(r"\btools\b", template) is not None
    chosen = name or (_shown_in(template) or _BY_MODEL_TYPE.get(model_type) if knows_tools else "hermes")
    return None if chosen is None else replace(FORMATS[chosen], is_shown_by_us=not knows_tools)


def _shown_in(template: str) -> str | None:
    return next((name for name, sign in _SIGNS if sign.search(template)), None)
