"""The scheduler's side of a KV connector, with a connector that only keeps count."""

from __future__ import annotations

import numpy as np
import pytest

from framework.batch import StepOutput, Transfers
from framework.nulls import NoConnector
from framework.request import RequestStatus, SamplingParams
from framework.scheduler import Scheduler


class Warehouse(NoConnector):
    """Has `there` tokens of every prompt, and keeps the blocks of stays that end if `keeps`."""

    def __init__(self, there=0, is_async=False, keeps=False):
        self.there, self.is_async, self.keeps = there, is_async, keeps
        self.loads, self.finished_leases, self.preempted_leases, self.lost = [], [], [], []

    def matched_tokens(self, request, num_computed_tokens):
        return (None if self.there is None else max(self.there - num_computed_tokens, 0)), self.is_async

    def after_alloc(self, request, blocks, num_external_tokens):
        self.loads.append((request.lease, [list(b) for b in blocks], num_external_tokens))

    def build_meta(self, scheduled):
        return ("meta", scheduled.step_id)

    def request_finished(self, request, blocks):
        self.finished_leases.append(request.lease)
        return self.keeps

    def request_preempted(self, request, blocks):
        self.preempted_leases.append(request.lease)
        return self.keeps

    def step_lost(self, meta):
        self.lost.append(meta)


def run(scheduler, is_lost=False, **reports):
    """One step with the connector's reports: sent, received, failed."""
    scheduled = scheduler.schedule()
    sampled = np.full((scheduled.num_rows, 1), 7, np.int32)
    output = StepOutput(sampled, scheduled.samples.astype(np.int32), connector=Transfers(**reports), is_lost=is_lost)
    scheduler.update(scheduled, output)
    return scheduled


def is_drained(scheduler):
    stats = scheduler.stats()
    return not scheduler.has_work() and stats["num_free_blocks"] == stats["num_blocks"] - 1


@pytest.mark.parametrize("there, taken", [(0, 0), (3, 0), (9, 8), (100, 12)])
def test_external_tokens_are_whole_blocks_and_leave_one_to_compute(sim, there, taken):
    warehouse = Warehouse(there)
    scheduler = Scheduler({}, sim.context(connector=warehouse))
    request = sim.request("a", range(14), 2)
    scheduler.add_request(request)
    scheduled = run(scheduler)
    assert scheduled.new[0].num_computed_tokens == request.num_cached_tokens == taken
    assert scheduled.num_scheduled_tokens.tolist() == [14 - taken]
    assert warehouse.loads == [(0, [[1, 2, 3, 4]], taken)]
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
    assert scheduler.has_work() and scheduler.pool.num_free == 29, "somebody has to make a step until they are back"
    scheduled = run(scheduler, sent=[0])
    assert scheduled.num_rows == 0 and is_drained(scheduler)


def test_report_of_a_lease_that_nobody_waits_for_changes_nothing(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(keeps=True)))
    scheduler.add_request(sim.request("a", range(9), 1))
    run(scheduler, sent=[5], received=[6])
    run(scheduler, sent=[0, 0])
    assert is_drained(scheduler)


def test_asynchronous_load_waits_with_its_blocks_and_without_a_row(sim):
    warehouse = Warehouse(8, is_async=True)
    scheduler = Scheduler({}, sim.context(connector=warehouse, max_num_seqs=1))
    request = sim.request("a", range(9), 1)
    scheduler.add_request(request)
    assert run(scheduler).num_rows == 0
    assert request.status is RequestStatus.LOADING and request.req_idx < 0 and request.block_ids == [[1, 2, 3]]
    assert scheduler.stats()["num_waiting"] == 1 and scheduler.pool.num_free == 29
    warehouse.there = 0
    scheduler.add_request(sim.request("b", range(20, 24), 1, arrival=1))
    assert [new.request_id for new in run(scheduler).new] == ["b"], "the only row serves others meanwhile"
    run(scheduler, received=[0])
    scheduled = run(scheduler)
    assert (scheduled.new[0].request_id, scheduled.new[0].num_computed_tokens) == ("a", 8)
    assert scheduled.num_scheduled_tokens.tolist() == [1] and request.num_cached_tokens == 8
    assert warehouse.loads == [(0, [[1, 2, 3]], 8), (1, [[4]], 0)], "allocated once a stay"
    assert is_drained(scheduler)


def test_loaded_blocks_are_published_when_they_have_arrived_and_not_before(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(8, is_async=True)))
    scheduler.add_request(sim.request("a", range(9), 1))
    run(scheduler)
    assert not scheduler.pool.published()
    run(scheduler, received=[0])
    assert len(scheduler.pool.published()) == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_aborted_load_gives_its_blocks_back_when_the_connector_has_let_go_of_them(sim, keeps):
    warehouse = Warehouse(8, is_async=True, keeps=keeps)
    scheduler = Scheduler({}, sim.context(connector=warehouse))
    scheduler.add_request(sim.request("a", range(9), 1))
    run(scheduler)
    assert scheduler.abort("a").finish_reason == "abort"
    assert scheduler.has_work() and scheduler.pool.num_free == 29 and warehouse.finished_leases == [0]
    run(scheduler, received=[0])
    assert is_drained(scheduler) is not keeps
    if keeps:
        run(scheduler, sent=[0])
    assert is_drained(scheduler)


def test_id_that_comes_back_while_its_load_is_under_way_is_not_mixed_up_with_it(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(8, is_async=True)))
    scheduler.add_request(sim.request("a", range(9), 1))
    run(scheduler)
    scheduler.abort("a")
    again = sim.request("a", range(9), 1, arrival=1)
    scheduler.add_request(again)
    run(scheduler, received=[0])
    assert again.status is RequestStatus.LOADING and again.lease == 1


@pytest.mark.parametrize("failed, computed", [(1, 0), (2, 4), (3, 8)])
def test_failed_load_within_the_step_is_computed_instead(sim, failed, computed):
    warehouse = Warehouse(12)
    scheduler = Scheduler({}, sim.context(connector=warehouse))
    request = sim.request("a", range(14), 2)
    scheduler.add_request(request)
    run(scheduler, failed=[failed])
    assert request.output_token_ids == [], "what the step drew means nothing"
    assert len(scheduler.pool.published()) == computed // 4, "nothing from the first failed block on is published"
    scheduled = run(scheduler)
    assert scheduled.preempted and scheduled.new[0].num_computed_tokens == request.num_cached_tokens == computed
    assert warehouse.loads[-1][2] == 0, "the connector is not trusted with the request again"
    assert scheduler.stats()["num_failed_loads"] == 1 and scheduler.stats()["num_preemptions"] == 0
    run(scheduler)
    assert request.output_token_ids == [7, 7] and is_drained(scheduler)


def test_failed_asynchronous_load_is_computed_instead_also_when_it_is_said_early(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(12, is_async=True)))
    request = sim.request("a", range(14), 1)
    scheduler.add_request(request)
    run(scheduler, failed=[2])
    run(scheduler, received=[0])
    scheduled = run(scheduler)
    assert scheduled.new[0].num_computed_tokens == request.num_cached_tokens == 4
    assert request.output_token_ids == [7] and is_drained(scheduler)


def test_running_request_takes_the_blocks_of_one_that_waits_with_loaded_ones(sim):
    warehouse = Warehouse(8, is_async=True)
    ctx = sim.context(connector=warehouse, num_blocks=7, max_num_batched_tokens=1, prefix_caching=False)
    scheduler = Scheduler({}, ctx)
    waits, runs = sim.request("a", range(20, 29), 2), sim.request("b", [1], 14, arrival=1)
    scheduler.add_request(waits)
    run(scheduler)
    warehouse.there = 0
    scheduler.add_request(runs)
    run(scheduler, received=[0])
    while waits.block_ids:
        assert run(scheduler).rows.tolist() == [runs.req_idx], "no budget is left for the loaded one"
    assert scheduler.pool.num_free == 2 and warehouse.preempted_leases == [0]
    while scheduler.has_work():
        run(scheduler)
    assert runs.num_preemptions == 0 and waits.output_token_ids == [7, 7] and is_drained(scheduler)


def test_tokens_that_were_loaded_and_given_up_again_are_not_counted_as_cached(sim):
    warehouse = Warehouse(8, is_async=True)
    ctx = sim.context(connector=warehouse, num_blocks=7, max_num_batched_tokens=1, prefix_caching=False)
    scheduler = Scheduler({}, ctx)
    waits, runs = sim.request("a", range(20, 29), 2), sim.request("b", [1], 14, arrival=1)
    scheduler.add_request(waits)
    run(scheduler)
    assert scheduler.stats()["connector_hit_tokens"] == 8
    warehouse.there = 0
    scheduler.add_request(runs)
    run(scheduler, received=[0])
    while waits.block_ids:
        run(scheduler)
    while scheduler.has_work():
        run(scheduler)
    stats = scheduler.stats()
    assert waits.num_cached_tokens == 0 and (stats["connector_hit_tokens"], stats["prefix_query_tokens"]) == (0, 10)


@pytest.mark.parametrize("is_async", [False, True])
def test_tokens_whose_load_failed_are_not_counted_as_cached(sim, is_async):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(12, is_async), prefix_caching=False))
    request = sim.request("a", range(14), 2)
    scheduler.add_request(request)
    run(scheduler, failed=[2], received=[0] if is_async else [])
    while scheduler.has_work():
        run(scheduler)
    stats = scheduler.stats()
    assert request.num_cached_tokens == 0 and (stats["connector_hit_tokens"], stats["prefix_query_tokens"]) == (0, 14)


def test_block_that_is_not_loaded_cannot_fail(sim):
    scheduler = Scheduler({}, sim.context(connector=Warehouse(8)))
    scheduler.add_request(sim.request("a", range(14), 2))
    with pytest.raises(AssertionError, match=r"block 2 has failed, but range\(0, 2\) are loaded"):
        run(scheduler, failed=[3])


def test_preempted_blocks_come_back_with_the_report(sim):
    warehouse = Warehouse(keeps=True)
    scheduler = Scheduler({}, sim.context(connector=warehouse, num_blocks=6))
    first, second = sim.request("a", range(8), 8), sim.request("b", range(20, 28), 4, arrival=1)
    scheduler.add_request(first)
    scheduler.add_request(second)
    while run(scheduler).num_rows:
        pass
    assert second.num_preemptions == 1 and warehouse.preempted_leases == [1]
    assert first.num_preemptions == 0 and first.num_output_tokens == 5, "waits for the blocks that the connector reads"
    run(scheduler, sent=[1])
    run(scheduler)
    assert first.num_output_tokens == 6


def test_lost_step_is_told_to_the_connector_with_its_metadata(sim):
    warehouse = Warehouse()
    scheduler = Scheduler({}, sim.context(connector=warehouse))
    scheduler.add_request(sim.request("a", range(9), 1))
    scheduled = scheduler.schedule()
    scheduler.abort("a")
    none = np.zeros((1, 1), np.int32)
    scheduler.update(scheduled, StepOutput(none, none[0], is_lost=True))
    assert warehouse.lost == [("meta", 0)] and is_drained(scheduler)
