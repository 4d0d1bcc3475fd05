"""How far back a stage has to look: a bound on the tokens before a request's last one that the host knows.

What a row really has before it stands on the device alone, and a step must not wait for it. Called by stages that
search the whole of what stands before a row.
"""

from __future__ import annotations

from framework.batch import NewRequest
from framework.request import SamplingParams


def longest_history(params: SamplingParams, request: NewRequest, max_model_len: int) -> int:
    """Most tokens that can ever stand before one that the request draws."""
    if params.max_tokens is None:
        return max_model_len
    return min(request.num_prompt_tokens + params.max_tokens, max_model_len)
