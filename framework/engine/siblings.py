"""The requests behind one with n > 1: one a completion, alike but for their seed.

The scheduler runs each for itself and lets them share the prompt's KV; the output side puts their completions together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from framework.request import MAX_N
from framework.rng import child_seed

if TYPE_CHECKING:
    from framework.request import Request


SIBLING_MARK = "\x1f"
"""Stands between a request's id and the number of its completion. No caller's id holds it: none can be a sibling's."""


def siblings_of(request: Request) -> list[Request]:
    """All n of them, in order. `request` itself is the first, with its own seed: it equals the one of n = 1."""
    if request.params.n == 1:
        return [request]
    everyone = [request, *(_sibling(request, index) for index in range(1, request.params.n))]
    for one in everyone:
        one.siblings = everyone
    return everyone


def _sibling(request: Request, index: int) -> Request:
    params = request.params
    if params.prompt_logprobs is not None:  # the first one brings them
        params = params.replace(prompt_logprobs=None)
    return replace(
        request,
        request_id=f"{request.request_id}{SIBLING_MARK}{index}",
        params=params,
        seed=child_seed(request.seed, index),
        sample_index=index,
        constraint=None if request.constraint is None else request.constraint.for_sibling(),
        arrival_index=request.arrival_index + index / MAX_N,
        token_ids=[],
        block_ids=[],
        block_hashes=[],
    )
