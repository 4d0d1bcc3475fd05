"""Requests of one prompt: one computes it, the others share its blocks and get a copy of the last, partial one."""

import pytest


@pytest.fixture
def family(sim):
    """family(shadow, n, prompt, max_tokens) -> n siblings, queued."""

    def make(shadow, n, prompt, max_tokens=6, name="r", **fields):
        everyone = [sim.request(f"{name}{i}", prompt, max_tokens, arrival=1 + i / 128, **fields) for i in range(n)]
        for one in everyone:
            one.siblings = everyone
            shadow.add(one)
        return everyone

    return make


def rows_of(scheduled):
    return dict(zip(scheduled.rows.tolist(), scheduled.num_scheduled_tokens.tolist(), strict=True))


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_is_computed_once_and_its_whole_blocks_are_shared(sim, family, caching):
    shadow = sim.Shadow(block_size=4, num_blocks=40, prefix_caching=caching)
    first, second, third = family(shadow, 3, range(10))
    one = shadow.step()
    assert [new.request_id for new in one.new] == ["r0"] and one.num_tokens == 10
    two = shadow.step()
    assert [(new.request_id, new.num_computed_tokens) for new in two.new] == [("r1", 9), ("r2", 9)]
    assert two.num_scheduled_tokens.tolist() == [1, 1, 1]
    assert first.block_ids[0][:2] == second.block_ids[0][:2] == third.block_ids[0][:2]
    assert len({r.block_ids[0][2] for r in (first, second, third)}) == 3
    assert two.block_ops.copy == [(first.block_ids[0][2], r.block_ids[0][2]) for r in (second, third)]
    assert [shadow.scheduler.pool.ref_count(b) for b in first.block_ids[0]] == [3, 3, 1]
    shadow.drain()  # values of every slot, and that all blocks come back


def test_prompt_of_whole_blocks_and_one_token_needs_no_copy(sim, family):
    shadow = sim.Shadow(block_size=4, num_blocks=40, prefix_caching=False)
    family(shadow, 2, range(9))
    shadow.step()
    scheduled = shadow.step()
    assert scheduled.new[0].num_computed_tokens == 8 and scheduled.block_ops.copy == []
    shadow.drain()


def test_siblings_wait_while_the_prompt_is_computed_in_chunks_and_hold_nobody_up(sim, family):
    shadow = sim.Shadow(block_size=4, num_blocks=40, max_num_batched_tokens=6, prefix_caching=False)
    family(shadow, 2, range(14))
    shadow.add(sim.request("other", [7], 6, arrival=2))
    assert [[new.request_id for new in shadow.step().new] for _ in range(4)] == [["r0"], [], ["other"], ["r1"]]
    shadow.drain()


def test_sibling_is_admitted_like_others_when_nobody_gives(sim, family):
    shadow = sim.Shadow(block_size=4, num_blocks=40, max_num_seqs=1, prefix_caching=False)
    family(shadow, 2, range(10), max_tokens=2)
    starts = [(new.request_id, new.num_computed_tokens) for _ in range(6) for new in shadow.step().new]
    assert starts == [("r0", 0), ("r1", 0)]
    shadow.drain()


def test_abort_of_the_one_that_gives_leaves_the_copy_right(sim, family):
    shadow = sim.Shadow(block_size=4, num_blocks=40, max_in_flight=2, prefix_caching=False)
    first, *_ = family(shadow, 3, range(10))
    shadow.issue()
    shadow.commit()
    copying = shadow.issue()
    assert copying.block_ops.copy
    shadow.abort("r0")
    shadow.add(other := _filler(sim))
    after = shadow.issue()
    assert other.request_id in [new.request_id for new in after.new]
    sources = {source for source, _ in copying.block_ops.copy}
    assert not sources & set(other.block_ids[0])
    assert first.finish_reason == "abort"
    shadow.drain()


def _filler(sim):
    """A request that takes every free block that it can get."""
    return sim.request("other", range(100, 120), 2, arrival=9)


def test_cached_tokens_and_counters_are_those_of_the_first(sim, family):
    shadow = sim.Shadow(block_size=4, num_blocks=40)
    shadow.add(sim.request("before", range(10), 1))
    shadow.drain()
    everyone = family(shadow, 3, range(10))
    shadow.drain()
    assert [r.num_cached_tokens for r in everyone] == [8, 8, 8]
    assert shadow.scheduler.stats()["prefix_hit_tokens"] == 8
    assert shadow.scheduler.stats()["prefix_query_tokens"] == 20


def test_preempted_sibling_gets_the_prompt_again_and_computes_its_own_tokens(sim, family):
    shadow = sim.Shadow(block_size=4, num_blocks=8, prefix_caching=False)
    everyone = family(shadow, 2, range(10), max_tokens=12)
    shadow.drain()
    assert sum(r.num_preemptions for r in everyone) > 0
    assert everyone[0].output_token_ids == everyone[1].output_token_ids


def test_what_a_step_in_flight_writes_is_not_copied(sim, family):
    """It might fail to load what it was to load."""
    shadow = sim.Shadow(block_size=4, num_blocks=40, max_in_flight=2, prefix_caching=False)
    family(shadow, 2, range(3))
    first, second = shadow.issue(), shadow.issue()
    assert [new.request_id for new in first.new] == ["r0"] and second.new == []
    shadow.commit()
    assert [new.request_id for new in shadow.issue().new] == ["r1"]
    shadow.drain()


def test_what_a_step_swaps_in_is_copied_by_a_later_one(sim, family):
    """Copies run before blocks are swapped in."""
    shadow = sim.Shadow(block_size=4, num_blocks=5, prefix_caching=False, policy="priority",
                        num_swap_blocks=4)  # fmt: skip
    first, _ = family(shadow, 2, range(3))
    shadow.step()
    shadow.step()
    assert first.num_computed_tokens == 4  # a whole block of it can be swapped, and none of the other one
    shadow.add(sim.request("urgent", range(20, 34), 2, arrival=2, priority=-1))
    steps = [shadow.step() for _ in range(4)]
    assert [[new.request_id for new in step.new] for step in steps] == [["urgent"], [], ["r0"], ["r1"]]
    assert steps[2].block_ops.swap_in and steps[3].block_ops.copy
    shadow.drain()


@pytest.mark.parametrize("caching, starts", [(True, [[0], [8] * 7]), (False, [[0] * 8])])
def test_nobody_waits_for_a_sibling_that_ends_before_it_can_give(sim, family, caching, starts):
    """What it leaves in the prefix cache is worth a step."""
    shadow = sim.Shadow(block_size=4, num_blocks=80, max_num_batched_tokens=256, prefix_caching=caching)
    family(shadow, 8, range(10), max_tokens=1)
    assert [[new.num_computed_tokens for new in shadow.step().new] for _ in starts] == starts
    shadow.drain()


def test_siblings_run_together_once_two_have_ended_with_their_first_token(sim, family):
    shadow = sim.Shadow(block_size=4, num_blocks=80, max_num_batched_tokens=256, prefix_caching=False)
    first = sim.expected_output(sim.request("alone", range(10)))[0][0]
    everyone = family(shadow, 6, range(10), eos_token_ids=frozenset([first]))
    assert [[new.request_id for new in shadow.step().new] for _ in range(3)] == [
        ["r0"],
        ["r1"],
        ["r2", "r3", "r4", "r5"],
    ]
    shadow.drain()
    assert {r.finish_reason for r in everyone} == {"stop"}


def test_sibling_whose_giver_makes_room_for_it_takes_nothing_of_it(sim, family):
    class OldestYields(sim.policies["fcfs"]):
        def victim(self, running):
            return min(running, key=lambda r: r.arrival_index)

    shadow = sim.Shadow(block_size=4, num_blocks=7, prefix_caching=False, policy=OldestYields({}, None))
    shadow.add(sim.request("other", range(20, 31), 5, arrival=2))
    first, second = family(shadow, 2, range(9))
    shadow.step()
    scheduled = shadow.step()
    assert first.num_preemptions == 1 and scheduled.new == [] and second.block_ids == []
    shadow.drain()
