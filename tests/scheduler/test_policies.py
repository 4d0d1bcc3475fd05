"""Who goes first and who yields, by the policies alone and inside the scheduler."""

from __future__ import annotations

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
