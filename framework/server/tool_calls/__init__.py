"""Calls of tools in what a model writes: found in its text, constrained, and shown in its prompt. No HTTP, no ids of
requests; called by the routes for chat and responses.

    tools = parser_for(chat template, model_type of the checkpoint, server.tool_format)   # None: calls cannot be read
    messages, shown = tools.prompt(messages, request.tools)           # for apply_chat_template(messages, tools=shown)
    constraint = tools.constraint(request.tools, request.tool_choice, parallel)        # for structured_outputs, or None
    skip_special_tokens = not tools.keeps_special_tokens
    stream = tools.stream(forced=is_forced(request.tool_choice), tools=request.tools, parallel=parallel)
    for event in stream.feed(delta): ...      # TextDelta(text), CallStarted(index, name), ArgumentsDelta(index, text)
    for event in stream.finish(): ...
    content, calls = tools.parse(text, ...)   # the same for a whole text, with the arguments of `stream`

`tools` and `tool_choice` have the form of chat completions (`{"type": "function", "function": {...}}`). With
`tool_choice="none"` nothing of this is used: tools are not shown, and text stays text. A call's id is
`tools.new_id()`. A request that gave a call ends with finish_reason `tool_calls`.
"""

from framework.server.tool_calls.choosing import FORMATS, parser_for
from framework.server.tool_calls.constraint import is_forced
from framework.server.tool_calls.events import ArgumentsDelta, CallStarted, Event, TextDelta, ToolCall
from framework.server.tool_calls.tool_format import ToolFormat, ToolStream, collected

__all__ = [
    "FORMATS",
    "ArgumentsDelta",
    "CallStarted",
    "Event",
    "TextDelta",
    "ToolCall",
    "ToolFormat",
    "ToolStream",
    "collected",
    "is_forced",
    "parser_for",
]
