"""Random histories of the scheduler and of the block pool; the shadow runner holds the rules."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from framework.request import SamplingParams
from framework.scheduler import BlockPool, BlockState

BUDGETS = [pytest.param(60, id="quick"), pytest.param(600, id="full", marks=pytest.mark.full)]


def most_columns(group, total, budget):
    """Blocks that a request of `total` tokens has at a time when it runs alone, found by trying every span."""
    size, most = group.block_size, 0
    for start in range(total):
        whole = start // size * size
        first = 0 if group.window is None else max(0, whole - group.window + 1) // size
        end = total if group.window is None else min(total, start + budget)
        most = max(most, -(-end // size) - first)
    return most


def bounded(max_examples, steps):
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=max_examples <= 60,
        suppress_health_check=list(HealthCheck),
    )


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self, sim):
        super().__init__()
        self.sim = sim
        self.count = 0

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(7, 20),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 2, 3, 7, 16, 40]),
        chunked_prefill=st.booleans(),
        prefix_caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["fcfs", "priority", "shortest"]),
        max_in_flight=st.integers(1, 3),
        windows=st.sampled_from([(None,), (None,), (None, None), (None, 3), (5,), (4, None, 9), (1, None), (6, 2)]),
        num_swap_blocks=st.sampled_from([0, 0, 3, 40]),
        connector_seed=st.sampled_from([None, None, 1, 2, 3]),
    )
    def build(self, windows, connector_seed, **limits):
        connector_seed = connector_seed if set(windows) == {None} else None
        self.shadow = self.sim.Shadow(connector_seed=connector_seed, windows=windows, **limits)

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 14),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        eos=st.sampled_from([frozenset(), frozenset(range(0, 50, 7))]),
        n=st.sampled_from([1, 1, 2, 4]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def add(self, shared, own, max_tokens, priority, salt, eos, n, prompt_logprobs):
        prompt = [*range(shared), *own]
        self.count += 1
        siblings = [
            self.sim.request(
                f"r{self.count}/{index}",
                prompt,
                max_tokens,
                arrival=self.count + index / 128,
                priority=priority,
                cache_salt=salt,
                eos_token_ids=eos,
                params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=None if index else prompt_logprobs),
            )
            for index in range(n)
        ]
        ctx = self.shadow.ctx
        total = siblings[0].max_total_tokens
        if not ctx.chunked_prefill and len(prompt) > ctx.max_num_batched_tokens:
            fits = False
        else:
            fits = sum(most_columns(group, total, ctx.max_num_batched_tokens) for group in ctx.groups) < ctx.num_blocks
        try:
            self.shadow.scheduler.check_request(siblings[0])
        except ValueError as error:
            assert "Raise" in str(error)
            assert not fits or -(-total // self.shadow.block_size) * len(ctx.groups) >= ctx.num_blocks
            return
        assert fits
        for request in siblings:
            request.siblings = siblings if n > 1 else ()
            self.shadow.add(request)

    @precondition(lambda self: len(self.shadow.in_flight) < self.shadow.ctx.max_in_flight)
    @rule()
    def issue(self):
        self.shadow.issue()

    @precondition(lambda self: self.shadow.in_flight)
    @rule()
    def commit(self):
        self.shadow.commit()

    @precondition(lambda self: self.shadow.in_flight)
    @rule()
    def lose(self):
        self.shadow.lose()

    @precondition(lambda self: self.shadow.in_flight and self.shadow.running())
    @rule(which=st.sets(st.integers(0, 4)))
    def restart(self, which):
        self.shadow.restart([r.request_id for i, r in enumerate(self.shadow.running()) if i in which])

    @precondition(lambda self: len(self.shadow.in_flight) < self.shadow.ctx.max_in_flight)
    @rule(num_answers=st.integers(0, 4))
    def fail_to_issue(self, num_answers):
        self.shadow.fail_to_issue(num_answers)

    @precondition(lambda self: self.shadow.scheduler.has_work())
    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            self.shadow.step()

    @precondition(lambda self: len(self.shadow.scheduler._requests) > 2)
    @rule(which=st.integers(0, 20), reason=st.sampled_from(["abort", "stop", "error"]))
    def end_early(self, which, reason):
        alive = list(self.shadow.scheduler._requests)
        name = alive[which % len(alive)]
        if reason == "error":
            self.shadow.errors[name] = "empty distribution"
        else:
            assert getattr(self.shadow, reason)(name).finish_reason == reason

    def teardown(self):
        if hasattr(self, "shadow"):
            self.shadow.drain()


class PoolMachine(RuleBasedStateMachine):
    """Against a model that holds every block's holders and key."""

    NUM_BLOCKS = 9

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.owners = []  # block lists in token order
        self.keys = {}  # key -> block, as published

    @precondition(lambda self: self.pool.num_free)
    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        count = min(count, self.pool.num_free)
        blocks = self.pool.allocate(count)
        assert blocks == sorted(set(blocks)) and len(blocks) == count and 0 not in blocks
        assert not any(block in owner for owner in self.owners for block in blocks)
        self.keys = {key: block for key, block in self.keys.items() if block not in blocks}
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 9))
    def free(self, which):
        self.pool.free(self.owners.pop(which % len(self.owners)))

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 9), key=st.integers(0, 5))
    def advance(self, which, key):
        """Moves a block of an owner one state on."""
        for block in self.owners[which % len(self.owners)]:
            state = self.pool.state(block)
            if state is BlockState.ALLOCATED:
                self.pool.write([block])
            elif state is BlockState.IN_FLIGHT:
                self.pool.commit(block)
            elif state is BlockState.COMMITTED:
                assert self.pool.publish(block, key) == (key not in self.keys)
                self.keys.setdefault(key, block)
            else:
                continue
            return

    @rule(key=st.integers(0, 5))
    def share(self, key):
        block = self.pool.find(key)
        assert block == self.keys.get(key)
        if block is not None:
            self.pool.acquire([block])
            self.owners.append([block])

    @invariant()
    def balanced(self):
        counts = [sum(owner.count(block) for owner in self.owners) for block in range(self.NUM_BLOCKS)]
        assert [self.pool.ref_count(block) for block in range(self.NUM_BLOCKS)] == counts
        assert self.pool.num_free == counts[1:].count(0)
        assert self.pool.published() == self.keys
        for block in range(1, self.NUM_BLOCKS):
            assert (self.pool.state(block) is BlockState.PUBLISHED) == (block in self.keys.values())
            assert counts[block] or self.pool.state(block) in (BlockState.FREE, BlockState.PUBLISHED)


@pytest.mark.parametrize("max_examples", BUDGETS)
def test_random_histories_of_the_scheduler_keep_every_rule(sim, max_examples):
    run_state_machine_as_test(partial(SchedulerMachine, sim), settings=bounded(max_examples, 40))


@pytest.mark.parametrize("max_examples", BUDGETS)
def test_random_operations_keep_the_block_pool_in_balance(max_examples):
    run_state_machine_as_test(PoolMachine, settings=bounded(max_examples, 40))
