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
    from framework.scheduler.kv_groups import KVGroups
    from framework.scheduler.ledger import Ledger

_ON_THEIR_WAY = (RequestStatus.RUNNING, RequestStatus.LOADING)


@dataclass(frozen=True, slots=True)
class Fork:
    """What `donor` gives: KV of the first `num_tokens` tokens, of which the first `num_blocks` blocks are whole."""

    donor: Request
    num_tokens: int
    num_blocks: int


def num_shared(request: Request) -> int:
    """Tokens of the prompt whose KV a sibling can give: one known token is always left to compute."""
    return min(request.num_prompt_tokens, request.num_tokens - 1)


def wants_fork(request: Request, num_there: int) -> bool:
    """Whether a sibling can give more than the `num_there` tokens that the request can have otherwise."""
    return request.params.prompt_logprobs is None and num_shared(request) > num_there


def fork_of(request: Request, groups: KVGroups, ledger: Ledger, arriving: Collection[Request]) -> Fork | None:
    """From a running sibling whose prompt is computed, by steps that have come back, and that has given up nothing that
    the request reads; None when there is none.

    A step in flight may still fail to load what it was to load: what it writes is neither shared nor copied. Nor is
    what those `arriving` with the step that is being made bring along: it swaps blocks in behind its copies.
    """
    num_tokens = num_shared(request)
    num_blocks = num_tokens // groups.block_size
    for other in request.siblings:
        is_there = other.status is RequestStatus.RUNNING and other.num_computed_tokens >= num_tokens
        is_there = is_there and other is not request and other not in arriving
        if is_there and ledger.leaves_alone(other, num_tokens) and not groups.has_passed(other.block_ids, num_tokens):
            assert other.num_published_blocks >= num_blocks, (other.request_id, other.num_published_blocks, num_blocks)
            return Fork(other, num_tokens, num_blocks)
    return None


def is_worth_waiting(request: Request, num_there: int, num_published: int, groups: KVGroups) -> bool:
    """Whether a sibling computes the prompt, or loads it, and will then leave more of it than the `num_there` tokens
    that the request can have now.

    num_published  tokens that it publishes, 0 without a prefix cache: all that is left of one that ends where its
                   prompt does
    What has befallen the first two is expected of all: nobody waits any more when both ended with their first token.
    Nor for one whose windows have left the prompt behind: what it leaves of it is there already.
    """
    if all(_ended_at_once(r) for r in request.siblings[:2]):
        return False
    others = (r for r in request.siblings if r is not request and r.status in _ON_THEIR_WAY)
    givers = (r for r in others if not groups.has_passed(r.block_ids, num_shared(request)))
    return any(num_published > num_there or r.num_tokens + 1 < r.max_total_tokens for r in givers)


def _ended_at_once(request: Request) -> bool:
    return request.status is RequestStatus.FINISHED and request.num_output_tokens == 1
