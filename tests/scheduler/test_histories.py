"""Random histories of crowded schedulers: siblings, steps that fail, preemption, swap and loads, all at once.

Beside the state machine of test_properties.py, which searches more widely and meets rare coincidences too seldom.
"""

from __future__ import annotations

import random

import pytest

from framework.request import SamplingParams

SEEDS = 100


WINDOWS = [(None,)] * 2 + [(None, None), (None, 3), (5,), (4, None, 9), (2, 7)]


def crowded(sim, rng):
    windows = rng.choice(WINDOWS)
    return sim.Shadow(
        block_size=rng.randint(1, 4),
        num_blocks=rng.randint(7, 16),
        max_num_seqs=rng.randint(2, 5),
        max_num_batched_tokens=rng.choice([3, 7, 16, 40]),
        chunked_prefill=rng.random() < 0.7,
        prefix_caching=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "priority", "shortest"]),
        max_in_flight=rng.randint(1, 3),
        windows=windows,
        num_swap_blocks=rng.choice([0, 9, 40]),
        connector_seed=rng.choice([None, 1, 2, 3]) if set(windows) == {None} else None,
    )


def add_siblings(sim, shadow, rng, number):
    """Some requests of one prompt, unless the pool or the budget is too small for them."""
    prompt = [*range(rng.randint(0, 12)), *[rng.randint(0, 3) for _ in range(rng.randint(1, 6))]]
    max_tokens, n, prompt_logprobs = rng.randint(1, 14), rng.choice([1, 2, 3, 5]), rng.choice([None] * 9 + [1])
    fields = {
        "priority": rng.randint(-1, 1),
        "cache_salt": rng.choice([None, None, "a"]),
        "eos_token_ids": rng.choice([frozenset(), frozenset(range(0, 50, 7))]),
    }
    siblings = [
        sim.request(
            f"r{number}/{i}", prompt, max_tokens, arrival=number + i / 128, **fields,
            params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=None if i else prompt_logprobs),
        )
        for i in range(n)
    ]  # fmt: skip
    try:
        shadow.scheduler.check_request(siblings[0])
    except ValueError:
        return
    for request in siblings:
        request.siblings = siblings if n > 1 else ()
        shadow.add(request)


def end_one(shadow, rng):
    name = rng.choice(list(shadow.scheduler._requests))
    end = rng.choice(["abort", "stop", "error"])
    if end == "error":
        shadow.errors[name] = "empty distribution"
    else:
        getattr(shadow, end)(name)


def go_on(shadow, rng):
    """A step is issued or comes back."""
    if shadow.in_flight and (rng.random() < 0.3 or len(shadow.in_flight) == shadow.ctx.max_in_flight):
        shadow.commit()
    elif rng.random() < 0.04:
        shadow.fail_to_issue(rng.randint(0, 4))
    else:
        shadow.issue()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_crowded_scheduler_keeps_every_rule(sim, seed):
    rng = random.Random(seed)
    shadow = crowded(sim, rng)
    for number in range(70):
        kind = rng.random()
        if kind < 0.25:
            add_siblings(sim, shadow, rng, number)
        elif kind < 0.28 and shadow.in_flight:
            shadow.lose()
        elif kind < 0.31 and shadow.in_flight:
            shadow.restart([r.request_id for r in shadow.running() if rng.random() < 0.3])
        elif kind < 0.38 and shadow.scheduler._requests:
            end_one(shadow, rng)
        else:
            go_on(shadow, rng)
    shadow.drain()
