"""Requests drawn from one prompt (`n > 1`): who has computed the prompt for the others, and how much they may share.

The first of them that runs computes the prompt; the others wait for it, share its whole blocks and get a copy of the
last, partial one. Nobody owns the group: whoever runs gives, and without anybody a sibling is admitted like others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from framework.request import Request
    from framework.scheduler.ledger import Ledger

_ON_THEIR_WAY = (RequestStatus.RUNNING, RequestStatus.LOADING)


@dataclass(frozen=True, slots=True)
class Fork:
    """What `donor` gives: KV of the first `num_tokens` tokens, of which the first `num_blocks` blocks are whole."""

    donor: Request
    num_tokens: int
    num_blocks: int


def _num_shared(request: Request) -> int:
    """Tokens of the prompt whose KV a sibling can give: one known token is always left to compute."""
    return min(request.num_prompt_tokens, request.num_tokens - 1)


def wants_fork(request: Request, num_there: int) -> bool:
    """Whether a sibling can give more than the `num_there` tokens that the request can have otherwise."""
    return request.params.prompt_logprobs is None and _num_shared(request) > num_there


def fork_of(request: Request, block_size: int, ledger: Ledger, arriving: Collection[Request]) -> Fork | None:
    """From a running sibling whose prompt is computed, by steps that have come back; None when there is none.

    A step in flight may still fail to load what it was to load: what it writes is neither shared nor copied. Nor is
    what those `arriving` with the step that is being made bring along: it swaps blocks in behind its copies.
    """
    num_tokens = _num_shared(request)
    num_blocks = num_tokens // block_size
    for other in request.siblings:
        is_there = other.status is RequestStatus.RUNNING and other.num_computed_tokens >= num_tokens
        is_there = is_there and other is not request and other not in arriving
        if is_there and ledger.leaves_alone(other, num_tokens):
            assert other.num_published_blocks >= num_blocks, (other.request_id, other.num_published_blocks, num_blocks)
            return Fork(other, num_tokens, num_blocks)
    return None


def is_computed_by_sibling(request: Request) -> bool:
    """Whether a sibling computes the prompt, or loads it, so that it can give it soon."""
    return any(r.status in _ON_THEIR_WAY for r in request.siblings if r is not request)
