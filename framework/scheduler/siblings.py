"""Requests drawn from one prompt (`n > 1`): who has computed the prompt for the others, and how much they may share.

The first of them that runs computes the prompt; the others wait for it, share its whole blocks and get a copy of the
last, partial one. Nobody owns the group: whoever runs gives, and without anybody a sibling is admitted like others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.request import RequestStatus

if TYPE_CHECKING:
    from framework.request import Request

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


def fork_of(request: Request, block_size: int) -> Fork | None:
    """From a running sibling whose prompt is computed; None when there is none.

    Whole blocks are shared once they are committed. The rest may be written by a step in flight: it is copied by a
    later one.
    """
    num_tokens = _num_shared(request)
    num_blocks = num_tokens // block_size
    for other in request.siblings:
        has_run = other.status is RequestStatus.RUNNING and other.num_computed_tokens >= num_tokens
        if other is not request and has_run and other.num_published_blocks >= num_blocks:
            return Fork(other, num_tokens, num_blocks)
    return None


def is_computed_by_sibling(request: Request) -> bool:
    """Whether a sibling computes the prompt, or loads it, so that it can give it soon."""
    return any(r.status in _ON_THEIR_WAY for r in request.siblings if r is not request)
