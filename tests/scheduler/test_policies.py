"""Who goes first and who yields, by the policies alone and inside the scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework_schedulers.policies import Fcfs, Priority, Shortest


def admitted(shadow):
    """Names in the order of their first admission."""
    names = []
    while shadow.scheduler.has_work():
        names += [new.request_id for new in shadow.step().new]
    shadow.drain()
    return list(dict.fromkeys(names))


def test_fcfs_takes_the_earliest_and_the_latest_yields(sim):
    requests = [sim.request(f"r{i}", [1], arrival=i, priority=-i) for i in (2, 0, 1)]
    policy = Fcfs({}, None)
    assert [r.arrival_index for r in policy.order(requests)] == [0, 1, 2]
    assert policy.victim(requests).arrival_index == 2


def test_priority_takes_the_lowest_number_ties_by_arrival(sim):
    requests = [sim.request(f"r{i}", [1], arrival=i, priority=p) for i, p in enumerate((1, 0, 1, 0))]
    policy = Priority({}, None)
    assert [r.arrival_index for r in policy.order(requests)] == [1, 3, 0, 2]
    assert policy.victim(requests).arrival_index == 2


def test_shortest_takes_the_fewest_remaining_tokens_ties_by_arrival(sim):
    requests = [sim.request(f"r{i}", range(n), arrival=i) for i, n in enumerate((5, 2, 9, 2))]
    policy = Shortest({}, None)
    assert [r.arrival_index for r in policy.order(requests)] == [1, 3, 0, 2]
    assert policy.victim(requests).arrival_index == 2


@pytest.mark.parametrize("policy, order", [("fcfs", "abcd"), ("priority", "cdab"), ("shortest", "dbac")])
def test_scheduler_admits_in_the_order_of_the_policy(sim, policy, order):
    shadow = sim.Shadow(policy=policy, max_num_seqs=1)
    for i, (name, length, priority) in enumerate([("a", 6, 2), ("b", 5, 2), ("c", 7, -1), ("d", 1, 0)]):
        shadow.add(sim.request(name, range(length), 2, arrival=i, priority=priority))
    assert "".join(admitted(shadow)) == order


def test_fcfs_is_not_overtaken_by_a_request_that_would_fit(sim):
    shadow = sim.Shadow(num_blocks=7)
    shadow.add(sim.request("big", range(12), 8))
    shadow.step()
    shadow.add(sim.request("bigger", range(20, 40), 1, arrival=1))
    shadow.add(sim.request("small", range(50, 52), 1, arrival=2))
    assert admitted(shadow) == ["bigger", "small"]


def test_long_prompt_does_not_starve_under_shortest(sim):
    policy = Shortest({}, None)
    long = sim.request("long", range(50), 1)
    for i in range(policy.PATIENCE):
        short = sim.request(f"s{i}", range(2), 1, arrival=i + 1)
        assert policy.order([long, short])[0] is short
        policy.admit(short, 10)
    assert policy.order([long, sim.request("last", range(2), 1, arrival=9999)])[0] is long


def test_shortest_counts_a_request_that_finds_no_blocks_once(sim):
    policy = Shortest({}, None)
    long, short = sim.request("long", range(50), 1), sim.request("short", range(2), 1, arrival=1)
    for _ in range(policy.PATIENCE + 1):
        assert policy.order([long, short])[0] is short
        policy.admit(short, 10)


def two_running(sim, policy):
    """Two requests in a pool of 6 blocks, of which they take two each now and one each in the next step."""
    shadow = sim.Shadow(policy=policy, num_blocks=7)
    shadow.add(sim.request("a", range(8), 12, priority=1))
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1, priority=0))
    shadow.step()
    return shadow


@pytest.mark.parametrize("policy, victim", [("fcfs", "b"), ("priority", "a")])
def test_policy_chooses_the_victim_when_blocks_run_out(sim, policy, victim):
    shadow = two_running(sim, policy)
    shadow.drain()
    preempted = {name for name, request in shadow.requests.items() if request.num_preemptions}
    assert preempted == {victim}


def test_urgent_request_displaces_a_running_one_only_when_blocks_run_out(sim):
    shadow = two_running(sim, "priority")
    shadow.step()
    assert shadow.scheduler.stats()["num_preemptions"] == 0 and shadow.scheduler.pool.num_free == 0
    shadow.add(sim.request("urgent", range(40, 44), 4, arrival=2, priority=-1))
    scheduled = shadow.step()
    assert [new.request_id for new in scheduled.new] == ["urgent"]
    assert shadow.requests["a"].num_preemptions == 1 and shadow.requests["b"].num_preemptions == 0
    shadow.drain()


def in_step(sim, num_blocks):
    """a runs before b, yields to b, and needs its next blocks in the same steps."""
    shadow = sim.Shadow(policy="priority", num_blocks=num_blocks)
    shadow.add(sim.request("a", range(7), 13, priority=1))
    shadow.step()
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1, priority=0))
    shadow.step()
    return shadow


def test_victim_that_was_scheduled_already_leaves_the_step(sim):
    shadow = in_step(sim, num_blocks=6)
    a, b = shadow.requests["a"], shadow.requests["b"]
    row = a.req_idx
    scheduled = shadow.step()  # a takes the last block, then b needs one
    assert scheduled.preempted == [row] and a.num_preemptions == 1
    assert scheduled.rows.tolist() == scheduled.new_block_ids[0].rows.tolist() == [b.req_idx]
    shadow.drain()


def test_budget_of_a_victim_goes_to_the_others(sim):
    shadow = in_step(sim, num_blocks=14)
    shadow.scheduler._ctx = replace(shadow.ctx, max_num_batched_tokens=4)
    shadow.add(sim.request("c", range(40, 64), 1, arrival=2))
    for _ in range(4):
        assert shadow.step().num_scheduled_tokens.tolist() == [1, 1, 2]
    scheduled = shadow.step()
    assert len(scheduled.preempted) == 1
    assert scheduled.num_scheduled_tokens.tolist() == [1, 3], "b decodes, c gets what a leaves"
    shadow.drain()


def test_blocks_that_only_the_victim_shares_are_counted_as_taken(sim):
    shadow = sim.Shadow(policy="priority", num_blocks=7)
    shadow.add(sim.request("a", range(8), 9, priority=2))
    shadow.add(sim.request("d", range(20, 28), 9, arrival=1, priority=1))
    shadow.step()
    shadow.add(sim.request("urgent", range(17), 1, arrival=2, priority=0))
    (new,) = shadow.step().new
    assert (new.request_id, new.num_computed_tokens) == ("urgent", 8)
    assert [shadow.requests[name].num_preemptions for name in "ad"] == [1, 1]
    shadow.drain()


def displaced_in_flight(sim, max_in_flight):
    """a is displaced by `urgent` while its step is in flight; b draws its last token in that step."""
    shadow = sim.Shadow(policy="priority", num_blocks=7, max_in_flight=max_in_flight)
    shadow.add(sim.request("a", range(8), 9, priority=5))
    shadow.add(sim.request("b", range(20, 22), 1, arrival=1, priority=9))
    shadow.issue()
    shadow.add(sim.request("urgent", range(40, 60), 1, arrival=2, priority=0))
    assert shadow.issue().new == []
    return shadow


def test_request_whose_last_token_is_in_flight_is_not_displaced(sim):
    shadow = displaced_in_flight(sim, 2)
    assert (shadow.requests["a"].num_preemptions, shadow.requests["b"].num_preemptions) == (1, 0)
    shadow.drain()


def test_token_of_a_request_that_was_readmitted_meanwhile_is_dropped(sim):
    shadow = displaced_in_flight(sim, 3)
    shadow.abort("urgent")
    assert [new.request_id for new in shadow.issue().new] == ["a"]
    assert [new.request.request_id for new in shadow.commit()] == ["b"]
    assert shadow.commit() == []
    assert [new.request.request_id for new in shadow.commit()] == ["a"]
    shadow.drain()


def test_urgent_request_waits_for_a_row(sim):
    shadow = sim.Shadow(policy="priority", max_num_seqs=1)
    shadow.add(sim.request("a", range(8), 4, priority=1))
    shadow.step()
    shadow.add(sim.request("urgent", range(4), 4, arrival=1, priority=-1))
    assert not shadow.step().new
    shadow.drain()
    assert shadow.scheduler.stats()["num_preemptions"] == 0


def test_late_request_displaces_nobody_under_fcfs(sim):
    shadow = two_running(sim, "fcfs")
    shadow.add(sim.request("c", range(40, 60), 2, arrival=2))
    assert not shadow.step().preempted
    shadow.drain()


class NamesAStranger(Fcfs):
    def victim(self, running):
        return STRANGER


class AdmitsNobody(Fcfs):
    def admit(self, request, budget):
        return budget > 60


def test_victim_that_does_not_run_is_the_policys_bug(sim):
    global STRANGER
    STRANGER = sim.request("stranger", [1])
    shadow = sim.Shadow(policy=NamesAStranger({}, None), num_blocks=7)
    shadow.add(sim.request("a", range(8), 12))
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1))
    with pytest.raises(AssertionError, match="NamesAStranger chose stranger"):
        shadow.drain()


def test_policy_can_hold_admission_back(sim):
    shadow = sim.Shadow(policy=AdmitsNobody({}, None))  # 64 tokens a step
    shadow.add(sim.request("a", range(8)))
    shadow.add(sim.request("b", range(20, 28), arrival=1))
    assert [new.request_id for new in shadow.step().new] == ["a"]
    shadow.drain()


class RefusesAll(Fcfs):
    def admit(self, request, budget):
        return False


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_policy_that_always_refuses_serves_one_request_at_a_time(sim, max_in_flight):
    shadow = sim.Shadow(policy=RefusesAll({}, None), max_in_flight=max_in_flight)
    for i in range(3):
        shadow.add(sim.request("abc"[i], range(8 * i, 8 * i + 8), arrival=i))
    arrivals = []
    while shadow.scheduler.has_work():
        arrivals.append([new.request_id for new in shadow.step().new])
        assert len(shadow.scheduler._running) <= 1
        assert len(arrivals) < 50, "nobody is admitted"
    assert [names for names in arrivals if names] == [["a"], ["b"], ["c"]]
    shadow.drain()
