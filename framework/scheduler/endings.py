"""Which token ends a request, and why. Stop strings are text and belong to the output side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.request import Request


def append_tokens(request: Request, tokens: Sequence[int]) -> tuple[list[int], str | None, int | None]:
    """Appends `tokens` up to and including the one that ends the request: (tokens taken, finish reason, stop reason).

    On one token eos goes before a stop id, and both before length. The stop reason is None but for a stop id.
    """
    taken: list[int] = []
    for token in tokens:
        request.token_ids.append(token)
        taken.append(token)
        if token in request.eos_token_ids:
            return taken, "stop", None
        if token in request.stop_token_ids:
            return taken, "stop", token
        if len(request.token_ids) >= request.max_total_tokens:
            return taken, "length", None
    return taken, None, None
