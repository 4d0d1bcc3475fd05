"""Bodies of requests, as pydantic models: their fields, their types, and what is refused by name.

Ranges are checked where parameters are made (`framework.request`). What a body means for the engine stands in `asking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from framework.errors import did_you_mean, shown

WITHOUT_EFFECT = (
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields of OpenAI's that clients send and that change nothing here: they speak of accounts and of its machines."""
NOT_SERVED = {
    "suffix": "text is only continued here; put what comes before into prompt",
    "best_of": "use n, and choose among the completions",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is made",
    "modalities": "only text is made",
    "prediction": "leave it out",
    "web_search_options": "leave it out",
    "reasoning_effort": "use chat_template_kwargs for what the model's template reads",
    "verbosity": "say it in a message",
    "use_beam_search": "use n with a temperature",
    "lora": "leave it out",
    "moderation": "leave it out",
}
"""Fields that other servers know, and what to do instead: refused rather than ignored."""


_T = TypeVar("_T")
_V = TypeVar("_V")


def _each(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """An object's members one after the other, up to the first wrong one."""
    if not isinstance(value, Mapping):
        return check(value)
    return {name: one for key in value for name, one in check({key: value[key]}).items()}


Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list of which the first wrong item is told: a body may hold a million, and looking for all takes a gigabyte."""
Members = Annotated[dict[str, _V], WrapValidator(_each)]
"""The same of an object."""


class Body(BaseModel):
    """A body whose every field is known: an unknown one is refused with the nearest."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        for name in body:
            if name not in cls.model_fields and name not in cls.WITHOUT_EFFECT and not _says_nothing(name, body[name]):
                raise PydanticCustomError(
                    "unknown_field", "{why}", {"why": cls._why_unknown(str(name)), "param": str(name)}
                )
        return {name: value for name, value in body.items() if name in cls.model_fields}

    @classmethod
    def _why_unknown(cls, name: str) -> str:
        if name in NOT_SERVED:
            return f"{name} is not served; {NOT_SERVED[name]}"
        near = did_you_mean(name, cls.model_fields) or f" Known: {', '.join(cls.model_fields)}"
        return f"there is no field {shown(name)}.{near}"


def _says_nothing(name: str, value: Any) -> bool:
    """Whether the field stands for its being left out: null, or `store` that asks to keep nothing."""
    return (name in NOT_SERVED and value is None) or (name == "store" and value in (None, False))


def whole_keys(value: Any) -> Any:
    """JSON has no keys but texts: those of logit_bias are token ids."""
    if not isinstance(value, Mapping):
        return value
    return {
        int(k) if isinstance(k, str) and k.isascii() and k.isdecimal() and len(k) < 20 else k: v
        for k, v in value.items()
    }


def _prompt_in_words(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """One refusal instead of one for each form that a prompt does not have."""
    try:
        return check(value)
    except ValidationError:
        why = "prompt must be a text, a list of token ids, or a list of texts or of such lists"
        raise PydanticCustomError("prompt", why, {"param": "prompt"}) from None


def together(param: str, message: str) -> PydanticCustomError:
    """Of a field that cannot stand as it does beside the others."""
    return PydanticCustomError("together", "{why}", {"why": message, "param": param})


class StreamOptions(Body):
    """include_usage: one more event with the number of tokens, before the end. include_obfuscation: padding of events,
    which is not made here."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Drawing(Body):
    """What every route that generates takes: fields of OpenAI, and those of `SamplingParams` beside them.

    null is the same as leaving a field out.
    """

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = WITHOUT_EFFECT

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stream: bool | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: str | Items[str] | None = None
    bad_words_token_ids: Items[Items[int]] | None = None
    stages: Members[bool] | None = None
    extra_args: Members[dict[str, Any]] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class Sampling(Drawing):
    """Fields that completions and chats share."""

    n: int | None = None
    max_tokens: int | None = None
    logit_bias: Annotated[dict[int, float], WrapValidator(_each), BeforeValidator(whole_keys)] | None = None
    stream_options: StreamOptions | None = None

    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Items[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(default=None, description="tells the ids of prompt and output as well")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream=true", {"param": "stream_options"})
        return self

    @model_validator(mode="after")
    def _ids_go_with_logprobs(self) -> Sampling:
        asked = getattr(self, "logprobs", None)  # a number of completions, a switch of chats
        if self.logprob_token_ids and (asked is None or asked is False):
            raise together("logprob_token_ids", "logprob_token_ids needs logprobs, beside which they are told")
        return self

    @property
    def wants_usage_event(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(Sampling):
    """`POST /v1/completions`."""

    prompt: Annotated[str | Items[str] | Items[int] | Items[Items[int]], WrapValidator(_prompt_in_words)] = Field(
        description="text, token ids, or a list of either"
    )
    logprobs: int | None = None
    echo: bool | None = Field(default=None, description="begins the text with the prompt; max_tokens may be 0 then")


class ResponseFormat(Body):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        schema = None if self.json_schema is None else self.json_schema.get("schema")
        if self.type == "json_schema" and not isinstance(schema, Mapping):
            raise PydanticCustomError(
                "response_format",
                'response_format.json_schema needs a schema: {{"name": ..., "schema": {{...}}}}',
                {"param": "response_format"},
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError(
                "response_format",
                "response_format.json_schema belongs to type=json_schema",
                {"param": "response_format"},
            )
        return self


class ChatBody(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Items[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _go_together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise together("top_logprobs", "top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise together("max_completion_tokens", "max_tokens and max_completion_tokens mean the same; leave out one")
        if self.response_format is not None and self.response_format.type != "text" and self.structured_outputs:
            both = "response_format and structured_outputs both say what the text has to be; leave out one"
            raise together("response_format", both)
        return self


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(default=None, description="of a prompt: true when left out")
    add_generation_prompt: bool | None = Field(default=None, description="of messages: true when left out")
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("together", "exactly one of prompt and messages is needed", {"param": "prompt"})
        wrong = (
            ("add_generation_prompt", "chat_template_kwargs", "tools")
            if self.messages is None
            else ("add_special_tokens",)
        )
        for name in wrong:
            if getattr(self, name) is not None:
                other = "messages" if self.messages is None else "a prompt"
                raise PydanticCustomError(
                    "together", "{name} belongs to {other}", {"name": name, "other": other, "param": name}
                )
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Items[int]
