"""The scheduler's side of a KV connector, with a connector that only keeps count."""

from __future__ import annotations

import numpy as np
import pytest

from framework.batch import StepOutput
from framework.errors import NotBuiltError
from framework.nulls import NoConnector
from framework.request import SamplingParams
from framework.scheduler import Scheduler


class Warehouse(NoConnector):
    """Has `there` tokens of every prompt, and keeps the blocks of ended requests if `keeps`."""

    def __init__(self, there=0, is_async=False, keeps=False):
        self.there, self.is_async, self.keeps, self.loads = there, is_async, keeps, []

    def matched_tokens(self, request, num_computed_tokens):
        return (None if self.there is None else max(self.there - num_computed_tokens, 0)), self.is_async

    def after_alloc(self, request, blocks, num_external_tokens):
        self.loads.append((request.request_id, [list(b) for b in blocks], num_external_tokens))

    def build_meta(self, scheduled):
        return ("meta", scheduled.step_id)

    def request_finished(self, request, blocks):
        return self.keeps


def run(scheduler, connector=None):
    scheduled = scheduler.schedule()
    sampled = np.full((scheduled.num_rows, 1), 7, np.int32)
    scheduler.update(scheduled, StepOutput(sampled, scheduled.samples.astype(np.int32), connector=connector))
    return scheduled


@pytest.mark.parametrize("there, taken", [(0, 0), (3, 0), (9, 8), (100, 12)])
def test_external_tokens_are_whole_blocks_and_leave_one_to_compute(sim, there, taken):
    warehouse = Warehouse(there)
    scheduler = Scheduler({}, sim.context(connector=warehouse))
    request = sim.request("a", range(14), 2)
    scheduler.add_request(request)
    scheduled = run(scheduler)
    assert scheduled.new[0].num_computed_tokens == request.num_cached_tokens == taken
    assert scheduled.num_scheduled_tokens.tolist() == [14 - taken]
    assert warehouse.loads == [("a", [[1, 2, 3, 4]], taken)]
    assert scheduled.connector_meta == ("meta", 0)
    assert len(scheduler.pool.published()) == 3, "loaded blocks are published with the step that loads them"


def test_external_tokens_go_on_from_the_local_hit(sim):
    warehouse = Warehouse()
    scheduler = Scheduler({}, sim.context(connector=warehouse))
    scheduler.add_request(sim.request("a", range(4), 1))
    run(scheduler)
    warehouse.there = 12
    scheduler.add_request(sim.request("b", range(14), 1, arrival=1))
    assert run(scheduler).new[0].num_computed_tokens == 12
    assert warehouse.loads[-1][2] == 8


def test_request_for_prompt_logprobs_takes_nothing_from_the_connector(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(8)))
    scheduler.add_request(sim.request("a", range(14), params=SamplingParams(prompt_logprobs=1, max_tokens=4)))
    assert run(scheduler).new[0].num_computed_tokens == 0


def test_only_the_request_that_the_connector_asks_to_wait_for_waits(sim):
    class KnowsB(Warehouse):
        def matched_tokens(self, request, num_computed_tokens):
            return (0 if request.request_id == "b" else self.there), False

    warehouse = KnowsB(None)
    scheduler = Scheduler({}, sim.context(connector=warehouse))
    scheduler.add_request(sim.request("a", range(4)))
    scheduler.add_request(sim.request("b", range(4), arrival=1))
    assert [new.request_id for new in run(scheduler).new] == ["b"]
    warehouse.there = 0
    assert [new.request_id for new in run(scheduler).new] == ["a"]


def test_kept_blocks_are_free_when_the_connector_has_sent_them(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(keeps=True)))
    scheduler.add_request(sim.request("a", range(9), 1))
    run(scheduler)
    assert not scheduler.has_work() and scheduler.pool.num_free == 29
    run(scheduler, connector=(["a"], [], []))
    assert scheduler.pool.num_free == 32


def test_asynchronous_load_is_refused_by_name(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(8, is_async=True)))
    scheduler.add_request(sim.request("a", range(9), 1))
    with pytest.raises(NotBuiltError, match="kv_connector Warehouse: asynchronous loads are not built yet"):
        scheduler.schedule()


def test_failed_load_is_refused_by_name(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(8)))
    scheduler.add_request(sim.request("a", range(9), 1))
    with pytest.raises(NotBuiltError, match=r"failed blocks \[3\]"):
        run(scheduler, connector=([], [], [3]))
