"""A policy that raises in the middle of a step: nothing that the step had planned is kept, moved later or lost."""

from __future__ import annotations

import pytest

from framework.request import RequestStatus
from framework_schedulers.policies import Fcfs


class Raising(Fcfs):
    """Raises when it is asked whether to admit the request named `boom`, the last to arrive."""

    def __init__(self):
        super().__init__({}, None)

    def admit(self, request, budget):
        if request.request_id == "boom":
            raise RuntimeError("policy")
        return True


def boom(sim, shadow):
    """Lets the step fail that is to admit `boom` behind others, and ends what ran, as an engine does."""
    shadow.add(sim.request("boom", [1, 2], 2, arrival=99))
    with pytest.raises(RuntimeError, match="policy"):
        shadow.issue()
    shadow.abort("boom")
    for request in list(shadow.scheduler._running):
        shadow.abort(request.request_id)


def siblings(sim, shadow, n):
    everyone = [sim.request(f"r{i}", range(10), 6, arrival=1 + i / 128) for i in range(n)]
    for one in everyone:
        one.siblings = everyone
        shadow.add(one)
    return everyone


def test_sources_of_its_copies_are_free(sim):
    shadow = sim.Shadow(num_blocks=40, policy=Raising())
    _, second = siblings(sim, shadow, 2)
    shadow.step()
    boom(sim, shadow)
    assert second.status is RequestStatus.PREEMPTED, "it had not run, and waits on"
    shadow.abort("r1")
    assert not shadow.scheduler.has_work() and shadow.scheduler.pool.num_free == 39


def test_who_had_arrived_with_it_runs_in_a_later_step(sim):
    shadow = sim.Shadow(num_blocks=40, policy=Raising())
    shadow.add(sim.request("a", range(9)))
    boom(sim, shadow)
    assert [new.request_id for new in shadow.step().new] == ["a"]
    shadow.drain()


def test_blocks_that_it_was_to_swap_in_are_computed_anew_and_not_moved_later(sim):
    shadow = sim.Shadow(num_blocks=7, num_swap_blocks=9, prefix_caching=False, policy=Raising())
    shadow.add(sim.request("a", range(8), 8))
    shadow.add(sim.request("b", range(20, 28), 8, arrival=1))
    while not shadow.step().preempted:
        pass
    shadow.abort("a")
    boom(sim, shadow)
    assert shadow.scheduler.stats()["num_free_swap_blocks"] == 9
    scheduled = shadow.step()
    assert [(new.request_id, new.num_computed_tokens) for new in scheduled.new] == [("b", 0)]
    assert not scheduled.block_ops
    shadow.drain()


def test_load_that_it_was_to_begin_does_not_write_into_blocks_of_somebody_else(sim):
    shadow = sim.Shadow(connector_seed=1, num_blocks=40, policy=Raising())
    shadow.add(sim.request("before", range(13), 1, arrival=3))
    shadow.drain()
    shadow.connector.store = {key: list(values) for key, values in shadow.value_of_key.items()}
    shadow.scheduler.pool.allocate(39)  # nothing is cached here any more
    shadow.scheduler.pool.free(range(1, 40))
    shadow.add(sim.request("a", range(13), arrival=9))
    boom(sim, shadow)
    assert shadow.scheduler.stats()["connector_hit_tokens"] == 12
    assert shadow.connector.loads == []
    shadow.drain()
