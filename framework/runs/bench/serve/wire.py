"""What the OpenAI APIs say: the body of a request, and what a streamed event tells. No network in here.

A dialect is what one server takes beyond the common ground; `client` finds it out before anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.runs.bench.serve.options import LoadOptions
    from framework.runs.bench.serve.prompts import Ask

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DONE = "[DONE]"


@dataclass(frozen=True)
class Dialect:
    """Whether prompts are token ids, and which fields the server takes."""

    ids: bool
    ignore_eos: bool
    usage: bool
    usage_per_chunk: bool

    @classmethod
    def wanted(cls, options: LoadOptions) -> Dialect:
        ids = options.api == "completions" and options.prompts != "text"
        return cls(ids, options.ignore_eos, True, options.usage_per_chunk)

    def weaker(self, options: LoadOptions) -> list[Dialect]:
        """What to try after a refusal: one of the wishes less, then all of them less that may be given up."""
        less = []
        if self.usage_per_chunk:
            less.append(replace(self, usage_per_chunk=False))
        if self.ignore_eos:
            less.append(replace(self, ignore_eos=False))
        if self.ids and options.prompts == "auto":
            less.append(replace(self, ids=False))
        if self.usage:
            less.append(replace(self, usage=False, usage_per_chunk=False))
        least = Dialect(self.ids and options.prompts != "auto", False, False, False)
        return [*less, least] if least != self and least not in less else less

    def facts(self) -> dict[str, Any]:
        counted = "usage of each chunk" if self.usage_per_chunk else "usage" if self.usage else "chunks"
        return {"prompts": "token ids" if self.ids else "text", "ignore_eos": self.ignore_eos, "tokens": counted}


def body_of(ask: Ask, options: LoadOptions, dialect: Dialect, model: str) -> dict[str, Any]:
    """The JSON object that is posted."""
    body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": ask.output_len, "seed": ask.seed}
    if options.api == "chat":
        body["messages"] = [{"role": "user", "content": ask.text}]
    else:
        body["prompt"] = list(ask.token_ids) if dialect.ids else ask.text
    if dialect.ignore_eos:
        body["ignore_eos"] = True
    if dialect.usage:
        each = {"continuous_usage_stats": True} if dialect.usage_per_chunk else {}
        body["stream_options"] = {"include_usage": True, **each}
    return {**body, **options.sampling}


@dataclass(frozen=True)
class Heard:
    """What an event tells. output_tokens: all so far; None where the event does not count them.

    has_choice  whether it belongs to the answer; the first of a chat, which names the role alone, does not
    """

    has_choice: bool = False
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None


def read_event(data: str) -> Heard:
    """Raises ValueError for what is no event of these APIs."""
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event is no object: {data[:80]}")
    if event.get("error"):
        return Heard(error=error_text(event))
    choice, usage = next(iter(event.get("choices") or ()), None), event.get("usage") or {}
    if choice is None and not usage and "choices" not in event:
        raise ValueError(f"an event has no choices: {data[:80]}")
    return Heard(
        **({} if choice is None else _of_choice(choice)),
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def _of_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    delta = choice.get("delta")
    text, is_role = choice.get("text"), False
    if isinstance(delta, Mapping):
        # A reasoning parser streams thoughts beside the content: both are tokens that the client sees.
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content") or thought
        is_role = "role" in delta and not text and choice.get("finish_reason") is None
    return {"has_choice": not is_role, "text": text or "", "finish_reason": choice.get("finish_reason")}


def error_text(event: Any) -> str:
    """What an error object of these APIs says, in whatever nesting."""
    error = event.get("error", event) if isinstance(event, dict) else event
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    return str(error)
