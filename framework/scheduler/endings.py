"""Which token ends a request, and why. Stop strings are text and belong to the output side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.request import Request


def stays(request: Request, token: int) -> bool:
    """Whether one more token leaves the request running: what nearly every row of nearly every step does."""
    return not (
        token in request.eos_token_ids
        or token in request.stop_token_ids
        or len(request.token_ids) + 1 >= request.max_total_tokens
    )


def append_tokens(request: Request, tokens: list[int]) -> tuple[list[int], str | None, int | None]:
    """Appends `tokens` up to and including the one that ends the request: (tokens taken, finish reason, stop reason).

    On one token eos goes before a stop id, and both before length. The stop reason is None but for a stop id.
    """
    known, first = request.token_ids, len(request.token_ids)
    for token in tokens:
        known.append(token)
        if token in request.eos_token_ids:
            return known[first:], "stop", None
        if token in request.stop_token_ids:
            return known[first:], "stop", token
        if len(known) >= request.max_total_tokens:
            return known[first:], "length", None
    return tokens, None, None
