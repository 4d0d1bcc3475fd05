"""The body of `/v1/responses`, checked, and read as that of a chat. Called by `responses`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from framework.server.protocol import Body, ChatBody, Drawing, Items, Members, together
from framework.server.responses_input import choice_of_chat, tools_of_chat
from framework.server.tool_calls import is_forced

LOGPROBS = "message.output_text.logprobs"
_AS_IN_CHATS = (*Drawing.model_fields, "logit_bias", "parallel_tool_calls", "top_logprobs", "chat_template_kwargs")
_NOT_SERVED = {
    "background": "leave it out, and read the stream",
    "conversation": "use previous_response_id",
    "prompt": "templates of prompts are not kept here; send the text as input",
    "max_tool_calls": "the client runs the tools itself, and can stop when it likes",
    "context_management": "shorten the input instead",
    "reasoning": "use chat_template_kwargs for what the model's template reads",
}


class TextFormat(BaseModel):
    """What the text has to be. A schema is always held to."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def told(self) -> dict[str, Any]:
        """As the response repeats it."""
        return {"name": "answer", **self.model_dump(by_alias=True, exclude_none=True)}

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError(
                "text_format", "text.format needs a schema with type=json_schema, and only then", {"param": "text"}
            )
        return self


class TextOptions(Body):
    format: TextFormat | None = None


class EventOptions(Body):
    """include_obfuscation: padding of events, which is not made here."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Drawing):
    """`POST /v1/responses`. null is the same as leaving a field out."""

    input: str | Items[dict[str, Any]] = Field(
        description="text, or items: message, function_call, function_call_output"
    )
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream_options: EventOptions | None = None
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Members[str] | None = None
    store: bool | None = Field(default=None, description="keeps the response, so that others can follow it")
    previous_response_id: str | None = Field(default=None, description="a stored response that this one follows")

    logit_bias: Members[float] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_served(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        for name, why in _NOT_SERVED.items():
            if not _asks_nothing(body.get(name)):
                raise PydanticCustomError("not_served", "{why}", {"why": f"{name} is not served; {why}", "param": name})
        return {name: value for name, value in body.items() if name not in _NOT_SERVED}

    @model_validator(mode="after")
    def _go_together(self) -> ResponsesBody:
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise together("top_logprobs", f"top_logprobs needs include=['{LOGPROBS}']")
        if self.stream_options is not None and not self.stream:
            raise together("stream_options", "stream_options needs stream=true")
        if self.format is not None and is_forced(choice_of_chat(self.tool_choice)):
            raise together("text", "text.format cannot go together with tools that have to be called; leave out one")
        return self

    @model_validator(mode="after")
    def _can_be_repeated(self) -> ResponsesBody:
        """The answer repeats these: half of a surrogate pair, and NaN, which some take for JSON, cannot be sent."""
        repeated = [self.tools, self.tool_choice, None if self.format is None else self.format.schema_]
        for name, value in zip(("tools", "tool_choice", "text"), repeated, strict=True):
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except (ValueError, RecursionError) as error:
                raise together(name, f"{name} cannot be written as JSON ({error})") from None
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def format(self) -> TextFormat | None:
        """None for any text."""
        asked = None if self.text is None else self.text.format
        return None if asked is None or asked.type == "text" else asked

    def as_chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatBody:
        """The body of a chat that asks for the same. RequestValidationError and ApiError name the field."""
        values = {name: getattr(self, name) for name in _AS_IN_CHATS}
        values |= {
            "messages": list(messages),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "response_format": None if self.format is None else _format_of_chat(self.format),
            "tools": None if self.tools is None else tools_of_chat(self.tools),
            "tool_choice": choice_of_chat(self.tool_choice),
        }
        try:
            return ChatBody.model_validate(values)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None


def _asks_nothing(value: Any) -> bool:
    """null, false, and options that are all null."""
    return value is None or value is False or (isinstance(value, Mapping) and all(v is None for v in value.values()))


def _format_of_chat(asked: TextFormat) -> dict[str, Any]:
    if asked.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": asked.name or "answer", "schema": asked.schema_}}
