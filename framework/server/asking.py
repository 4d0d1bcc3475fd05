"""From a body to what the engine is asked for: parameters with the configured defaults below them, and prompts.

Only what the protocol means is decided here; checks that need the model are those of admission.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from framework.engine.admission import Prompt
from framework.errors import shown
from framework.request import OutputKind, SamplingParams
from framework.server.errors import ApiError, refusing
from framework.server.lengths import check_length, refuse_long

if TYPE_CHECKING:
    from framework.server.protocol import Sampling
    from framework.server.service import Service

_FIELDS = frozenset(f.name for f in fields(SamplingParams))
_PLAIN_ID = re.compile(r"[\w.:-]{1,80}", re.ASCII)
LONG_TEXT = 4096
"""Characters from which on a text is turned into ids beside the event loop, which others wait for."""
MOST_WORDS, MOST_LETTERS = 1024, 65536
"""Of stop strings and of bad words, in one request: what they cost is paid between the steps of everybody."""


def check_model(service: Service, name: str | None) -> None:
    """ApiError 404 for a model that is not the one served; None stands for it."""
    if name is not None and name != service.model_name:
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here; this server has '{service.model_name}'",
            param="model",
            code="model_not_found",
        )


def params_of(service: Service, body: Sampling, **changes: Any) -> SamplingParams:
    """The caller's parameters over the configured defaults. changes: what the protocol says otherwise than the body."""
    given = {name: value for name, value in body if name in _FIELDS and value is not None}
    kind = OutputKind.DELTA if body.stream else OutputKind.FINAL
    with refusing():
        params = service.llm.admission.defaults.replace(**{**given, "output_kind": kind, **changes})
    _check_limits(service, params)
    return params


def _check_limits(service: Service, params: SamplingParams) -> None:
    if params.n > service.options.max_n:
        raise ApiError(400, f"n={params.n} is above this server's limit of {service.options.max_n}", param="n")
    most = service.options.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(params, name)
        if k is not None and not 0 <= k <= most:
            what = "the whole vocabulary" if k == -1 else str(k)
            raise ApiError(400, f"{name}={what} is above this server's limit of {most} tokens", param=name)
    for name in ("stop", "bad_words"):
        words: Sequence[str] = getattr(params, name) or ()
        if len(words) > MOST_WORDS or sum(map(len, words)) > MOST_LETTERS:
            limit = f"{MOST_WORDS} strings with {MOST_LETTERS} characters in all"
            raise ApiError(400, f"{name} is above this server's limit of {limit}; pass fewer", param=name)
    if params.logprob_token_ids is not None and len(params.logprob_token_ids) > most:
        raise ApiError(
            400, f"logprob_token_ids holds more than this server's limit of {most} tokens", param="logprob_token_ids"
        )


async def prompt_of(service: Service, prompt: Any, body: Sampling) -> Prompt:
    """A checked prompt. ApiError for what is none, and for one that is longer than the model reads."""
    admission = service.llm.admission
    if isinstance(prompt, list):  # before a body full of ids is looked at one by one
        check_length(service, len(prompt))
    asked = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **_prompt_keys(body)}

    def read() -> Prompt:
        if isinstance(prompt, str):
            refuse_long(service, prompt)
        return admission.prompt(asked)

    with refusing():
        is_long = isinstance(prompt, str) and len(prompt) > LONG_TEXT
        made = await asyncio.get_running_loop().run_in_executor(None, read) if is_long else read()
    check_length(service, len(made.token_ids))
    return made


def with_keys(service: Service, prompt: Prompt, body: Sampling) -> Prompt:
    """A rendered conversation with the keys of the body that go with a prompt. ApiError for wrong ones."""
    asked: dict[str, Any] = {"prompt_token_ids": prompt.token_ids}
    with refusing():
        checked = service.llm.admission.prompt({**asked, **_prompt_keys(body)})
    return replace(checked, text=prompt.text)


def _prompt_keys(body: Sampling) -> dict[str, Any]:
    named = {"cache_salt": body.cache_salt, "priority": body.priority}
    return {key: value for key, value in named.items() if value is not None}


def new_id(kind: str, headers: Mapping[str, str]) -> str:
    """An id that no request has yet: with the caller's own in it, where that can stand in a name."""
    given = headers.get("x-request-id", "")
    made = uuid.uuid4().hex
    return f"{kind}-{given}-{made[:8]}" if _PLAIN_ID.fullmatch(given) else f"{kind}-{made}"


def prompts_of(prompt: Any) -> Sequence[Any]:
    """The prompts of a completion's body: one text or list of ids, or a list of either."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)
