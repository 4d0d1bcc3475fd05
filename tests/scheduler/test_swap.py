"""Preemption that keeps blocks in host memory: what is moved, when, and what happens when there is no room."""

from __future__ import annotations

import numpy as np
import pytest

from framework.batch import BlockOps, StepOutput
from framework.request import SamplingParams
from framework.scheduler.swap_space import SwapSpace


def crowded(sim, **changes):
    """Two requests of 8 tokens that outgrow 6 blocks: the second one yields."""
    shadow = sim.Shadow(**{"num_blocks": 7, "num_swap_blocks": 9, "prefix_caching": False, **changes})
    shadow.add(sim.request("a", range(8), 8))
    shadow.add(sim.request("b", range(20, 28), 8, arrival=1))
    return shadow


def until_preempted(shadow):
    while True:
        scheduled = shadow.step()
        if scheduled.preempted:
            return scheduled


@pytest.mark.parametrize("max_in_flight, num_committed", [(1, 3), (2, 2), (3, 2)])
def test_preempted_request_is_swapped_out_and_comes_back_with_its_blocks(sim, max_in_flight, num_committed):
    shadow = crowded(sim, max_in_flight=max_in_flight)
    out = until_preempted(shadow).block_ops.swap_out
    assert len(out) == num_committed, "no step in flight writes to a block that is swapped out"
    while not (scheduled := shadow.step()).block_ops.swap_in:
        pass
    new = scheduled.new[0]
    assert (new.request_id, new.num_computed_tokens) == ("b", 4 * num_committed)
    assert [host for host, _ in scheduled.block_ops.swap_in] == [host for _, host in out]
    shadow.drain()
    assert shadow.scheduler.stats()["num_swap_outs"] == 1


def test_only_blocks_that_have_left_the_prefix_cache_are_brought_back(sim):
    shadow = crowded(sim, prefix_caching=True)
    out = until_preempted(shadow).block_ops.swap_out
    shadow.abort("a")
    scheduled = shadow.step()
    assert scheduled.new[0].num_computed_tokens == 12
    assert [host for host, _ in scheduled.block_ops.swap_in] == [out[-1][1]], "one block went to the other request"
    shadow.drain()


def test_full_host_memory_falls_back_to_recompute_and_is_counted(sim):
    shadow = crowded(sim, num_swap_blocks=1)
    assert not until_preempted(shadow).block_ops
    shadow.drain()
    stats = shadow.scheduler.stats()
    assert (stats["num_preemptions"], stats["num_swap_outs"], stats["num_swap_fallbacks"]) == (1, 0, 1)


def test_without_swap_space_nothing_is_moved_or_counted_as_a_fallback(sim):
    shadow = crowded(sim, num_swap_blocks=0)
    assert not until_preempted(shadow).block_ops
    shadow.drain()
    assert shadow.scheduler.stats()["num_swap_fallbacks"] == 0


def test_aborted_request_leaves_its_host_blocks(sim):
    shadow = crowded(sim)
    until_preempted(shadow)
    shadow.abort("b")
    assert shadow.scheduler.stats()["num_free_swap_blocks"] == 9
    shadow.drain()


def test_request_for_prompt_logprobs_is_computed_again(sim):
    shadow = sim.Shadow(num_blocks=6, num_swap_blocks=9)
    shadow.add(sim.request("a", range(8), 8))
    params = SamplingParams(prompt_logprobs=1, max_tokens=4)
    shadow.add(sim.request("b", range(20, 28), 4, arrival=1, params=params))
    assert not until_preempted(shadow).block_ops
    shadow.drain()


def test_move_of_a_step_that_failed_is_not_relied_upon(sim):
    shadow = crowded(sim)
    while not (scheduled := shadow.issue()).preempted:
        shadow.commit()
    assert scheduled.block_ops.swap_out
    shadow.abort("a")
    none = np.zeros((1, 1), np.int32)
    shadow.in_flight.clear()
    shadow.scheduler.update(scheduled, StepOutput(none, none[0], is_lost=True))
    assert shadow.step().new[0].num_computed_tokens == 0
    shadow.drain()


def test_host_block_that_a_step_reads_is_written_by_a_later_one_at_the_earliest():
    space, ops = SwapSpace(2), BlockOps()
    first, second = object(), object()
    assert space.swap_out(first, [[5, 6]])
    space.emit(ops)
    space.swap_in(first, [[7, 8]], 0)
    assert not space.swap_out(second, [[5]]), "the swapping step still reads both"
    space.emit(ops)
    assert ops.swap_in == [(0, 7), (1, 8)] and space.swap_out(second, [[5]])


def test_a_request_is_swapped_out_whole_or_not_at_all():
    space = SwapSpace(3)
    assert not space.swap_out(object(), [[1, 2], [3, 4]])
    assert space.num_free == 3
