"""How long a prompt may be: one that leaves nothing to generate is refused, by its beginning where that is enough.

Called where bodies become prompts (`asking`, `chat`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.server.errors import ApiError

if TYPE_CHECKING:
    from framework.server.service import Service

BEGINNING = 8
"""Characters for each token of the limit that are turned into ids first of a text that has many more."""
MARGIN = 64
"""Tokens by which a whole text may be shorter than its beginning: the cut may fall into a word."""


def check_length(service: Service, num_tokens: int) -> None:
    """ApiError for a prompt of as many tokens as the model reads, or more, with the code that clients know."""
    if num_tokens >= service.llm.admission.limits.max_model_len:
        raise _too_long(service, str(num_tokens))


def refuse_long(service: Service, text: str) -> None:
    """ApiError for a text whose beginning is too long already.

    Turning all of it into ids takes about a second and 40 MB for each million characters. Takes its time: not for the
    event loop.
    """
    tokenizer, limit = service.llm.admission.tokenizer, service.llm.admission.limits.max_model_len
    size = BEGINNING * limit
    while tokenizer is not None and 2 * size < len(text):
        if len(tokenizer.encode(text[:size], add_special_tokens=False)) >= limit + MARGIN:
            raise _too_long(service, f"more than {limit}")
        size *= 4


def _too_long(service: Service, num_tokens: str) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {num_tokens} tokens but engine.max_model_len is {service.llm.admission.limits.max_model_len}, "
        "and one must be left to generate. Shorten the prompt or raise engine.max_model_len",
        param="prompt",
        code="context_length_exceeded",
    )
