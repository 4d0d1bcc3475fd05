"""Steps that go on: nothing is done a request a step, and nobody who looks can tell."""

from __future__ import annotations

import random

import numpy as np
import pytest

from framework.batch import LogprobsColumns, StepOutput
from framework.nulls import NoConnector
from framework.request import OneEach, SamplingParams
from framework.scheduler import Scheduler, course

CHANGES = ("add", "abort", "stop", "error", "restart", "lose", "fail", "look")


def state(shadow):
    """What anybody may see of the requests, and of the pool."""
    stats = shadow.scheduler.stats()
    return stats, {
        name: (
            r.token_ids, r.num_computed_tokens, r.num_in_flight, r.num_published_blocks, r.num_preemptions, r.status,
            r.finish_reason, r.req_idx, [len(blocks) for blocks in r.block_ids], r.block_hashes,
        )
        for name, r in shadow.requests.items()
    }  # fmt: skip


def told(news):
    return [(n.request.request_id, n.token_ids, n.finish_reason, n.logprobs_row, n.error) for n in news]


class Twins:
    """A scheduler, and one that decides every step anew."""

    def __init__(self, sim, rng):
        block_size, num_groups = rng.randint(1, 4), rng.choice([1, 2])
        limits = {
            "block_size": block_size, "num_groups": num_groups, "max_num_seqs": rng.randint(2, 5),
            "num_blocks": 1 + num_groups * (32 // block_size + rng.randint(1, 20)),
            "max_num_batched_tokens": rng.choice([7, 40]), "prefix_caching": rng.random() < 0.5,
            "max_in_flight": rng.randint(1, 3), "num_swap_blocks": rng.choice([0, 9]),
            "policy": rng.choice(["fcfs", "priority"]),
        }  # fmt: skip
        self.both = sim.Shadow(**limits), sim.Shadow(**limits)
        self.both[1].scheduler._go_on = lambda: None
        self.both[1].scheduler._commit_decodes = lambda step, output: False
        self.sim, self.rng, self.count = sim, rng, 0
        self.num_courses = 0

    def change(self, kind):
        one, _ = self.both
        alive = list(one.scheduler._requests)
        if kind == "add":
            self.add()
        elif kind in ("abort", "stop") and alive:
            name = self.rng.choice(alive)
            for shadow in self.both:
                getattr(shadow, kind)(name)
        elif kind == "error" and alive:
            name = self.rng.choice(alive)
            for shadow in self.both:
                shadow.errors[name] = "empty"
        elif kind == "restart" and one.in_flight:
            ended = [r.request_id for r in one.running() if self.rng.random() < 0.3]
            for shadow in self.both:
                shadow.restart(ended)
        elif kind == "lose" and one.in_flight:
            for shadow in self.both:
                shadow.lose()
        elif kind == "fail" and len(one.in_flight) < one.ctx.max_in_flight:
            for shadow in self.both:
                shadow.fail_to_issue(0)

    def add(self):
        self.count += 1
        n, prompt = self.rng.choice([1, 1, 2]), [self.rng.randint(0, 3) for _ in range(self.rng.randint(1, 7))]
        max_tokens, eos = self.rng.randint(8, 25), self.rng.choice([frozenset(), frozenset([17])])
        for shadow in self.both:
            siblings = [
                self.sim.request(
                    f"r{self.count}/{i}", prompt, max_tokens, arrival=self.count + i / 128, eos_token_ids=eos
                )
                for i in range(n)
            ]
            for request in siblings:
                request.siblings = siblings if n > 1 else ()
                shadow.add(request)

    def go_on(self):
        one, other = self.both
        if one.in_flight and (len(one.in_flight) == one.ctx.max_in_flight or self.rng.random() < 0.4):
            news = one.commit()
            self.num_courses += isinstance(news, OneEach)
            assert told(news) == told(other.commit())
        else:
            mine, theirs = one.issue(), other.issue()
            assert mine.rows.tolist() == theirs.rows.tolist() and mine.goes_on == theirs.goes_on
            assert mine.num_computed_tokens.tolist() == theirs.num_computed_tokens.tolist()


def history(sim, rng):
    """Runs twins through a random history; returns the number of steps that a course took back."""
    twins = Twins(sim, rng)
    twins.add()
    for _ in range(200):
        if rng.random() < 0.92:
            twins.go_on()
            continue
        twins.change(rng.choice(CHANGES))
        assert state(twins.both[0]) == state(twins.both[1])
    for shadow in twins.both:
        shadow.drain()
    assert state(twins.both[0]) == state(twins.both[1])
    return twins.num_courses


@pytest.mark.parametrize("seed", range(8))
def test_whoever_looks_finds_what_steps_decided_anew_would_have_left(sim, monkeypatch, seed):
    monkeypatch.setattr(course, "MAX_UNTOLD", (2, 5, 64)[seed % 3])
    rng = random.Random(seed)
    assert sum(history(sim, rng) for _ in range(6)) > 20


def decoding(sim, *names, params=None, max_tokens=40, **changes):
    """A scheduler in the middle of a course of requests of three tokens each."""
    scheduler = Scheduler({}, sim.context(**changes))
    for i, name in enumerate(names):
        scheduler.add_request(sim.request(name, [1, 2, 3], max_tokens, params=params, arrival=i))
    for _ in range(3):
        run(scheduler)
    return scheduler


def output_of(scheduled, token=7, **changes):
    r = scheduled.num_rows
    return StepOutput(np.full((r, 1), token, np.int32), np.ones(r, np.int32), **changes)


def run(scheduler, **changes):
    scheduled = scheduler.schedule()
    return scheduler.update(scheduled, output_of(scheduled, **changes))


def test_tokens_that_are_read_come_with_requests_that_have_them(sim):
    scheduler = decoding(sim, "a", "b")
    run(scheduler)
    news = run(scheduler)
    assert isinstance(news, OneEach) and len(news) == 2
    assert news[1].request.token_ids == [1, 2, 3, *[7] * 5] and news[1].token_ids == [7]
    assert [new.request.request_id for new in news] == ["a", "b"]
    assert [(new.request.num_computed_tokens, new.request.num_in_flight) for new in news] == [(7, 0), (7, 0)]


@pytest.mark.parametrize("look", ["stats", "abort", "stop", "add_request", "restart"])
def test_calls_from_outside_bring_requests_up_to_date(sim, look):
    scheduler = decoding(sim, "a", "b")
    a = scheduler._requests["a"]
    for _ in range(3):
        run(scheduler)
    arguments = {"abort": ["b"], "stop": ["b", "text"], "add_request": [sim.request("c", [1])]}.get(look, [])
    getattr(scheduler, look)(*arguments)
    assert a.num_tokens == 9 and a.num_in_flight == 0


def test_steps_in_flight_count_when_somebody_looks(sim):
    scheduler = decoding(sim, "a", max_in_flight=3)
    steps = [scheduler.schedule() for _ in range(3)]
    scheduler.update(steps[0], output_of(steps[0]))
    scheduler.stats()
    (a,) = scheduler._running
    assert (a.num_tokens, a.num_computed_tokens, a.num_in_flight) == (7, 8, 2)


@pytest.mark.parametrize("fault", ["error", "stop id"])
def test_step_in_the_middle_that_ends_a_request_gives_its_tokens_behind_the_earlier_ones(sim, fault):
    scheduler = decoding(sim, "a", "b", params=SamplingParams(max_tokens=40), max_in_flight=2)
    a, b = scheduler._running
    a.stop_token_ids = frozenset([9])
    scheduler.restart()  # a course knows the stop ids of its requests from its begin
    for _ in range(4):
        run(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.goes_on
    output = output_of(first)
    output.sampled[0] = 9
    if fault == "error":
        output.errors = {0: "empty"}
    news = scheduler.update(first, output)
    assert [(new.request, new.finish_reason) for new in news] == [(a, fault.split()[0]), (b, None)]
    (new,) = scheduler.update(second, output_of(second, token=5))
    assert new.request is b and b.output_token_ids == [*[7] * 8, 5]
    assert a.output_token_ids == [7] * 7 if fault == "error" else [*[7] * 7, 9]


def test_logprobs_of_a_course_stand_in_the_batch_row(sim):
    scheduler = Scheduler({}, sim.context())
    for i, logprobs in enumerate((None, 1, 0)):
        params = SamplingParams(max_tokens=30, logprobs=logprobs)
        scheduler.add_request(sim.request(f"r{i}", [1, 2], 30, params=params, arrival=i))
    ones = np.ones((3, 1), np.int32)
    columns = LogprobsColumns(np.zeros(3, np.float32), ones[:, 0], ones, np.zeros((3, 1), np.float32), ones)
    for _ in range(4):
        news = run(scheduler, logprobs=columns)
    assert isinstance(news, OneEach) and news.has_logprobs
    assert [new.logprobs_row for new in news] == [-1, 1, 2]


@pytest.mark.parametrize("more", [{"told": {"stage": [1, None]}}, {"prompt_logprobs": {0: None}}])
def test_what_comes_beside_tokens_is_told_in_the_middle_of_a_course(sim, more):
    scheduler = decoding(sim, "a", "b")
    run(scheduler)
    news = run(scheduler, **more)
    assert isinstance(news, list) and [new.token_ids for new in news] == [[7], [7]]
    if "told" in more:
        assert [new.payloads for new in news] == [{"stage": [1]}, {}]
    news = run(scheduler)
    assert isinstance(news, OneEach) and news[0].request.output_token_ids == [7] * 6


class Looking(NoConnector):
    """Notes what its requests say of themselves with every step."""

    def __init__(self):
        self.requests, self.seen = [], []

    def after_alloc(self, request, blocks, num_external_tokens):
        self.requests.append(request)

    def build_meta(self, scheduled):
        self.seen.append([(r.num_tokens, r.num_computed_tokens, r.num_in_flight) for r in self.requests])


def test_connector_sees_requests_up_to_date_with_every_step(sim):
    connector = Looking()
    decoding(sim, "a", connector=connector)
    assert connector.seen == [[(3, 3, 1)], [(4, 4, 1)], [(5, 5, 1)]]
    scheduler = decoding(sim, "b", connector=(connector := Looking()))
    for _ in range(4):
        run(scheduler)
    assert connector.seen[-1] == [(9, 9, 1)]


def test_victim_of_a_preemption_behind_a_course_comes_back_with_its_tokens(sim):
    shadow = sim.Shadow(num_blocks=15, block_size=2, max_num_seqs=3, max_in_flight=2)
    for i, name in enumerate("abc"):
        shadow.add(sim.request(name, [i, 1], 20, arrival=i))
    num_courses = 0
    while not shadow.scheduler.stats()["num_preemptions"]:
        shadow.issue()
        num_courses += len(shadow.in_flight) == 2 and isinstance(shadow.commit(), OneEach)
    assert num_courses > 2
    shadow.drain()


def test_blocks_that_a_course_gives_name_the_batch_rows(sim):
    scheduler = decoding(sim, "a", "b", max_tokens=20, block_size=2, num_groups=2)
    for _ in range(2):  # prompts of three tokens, all at the same place of a block
        scheduled = scheduler.schedule()
        for delta in scheduled.new_block_ids:
            assert (len(delta.rows) == 2) == (scheduled.num_computed_tokens[0] % 2 == 0)
            if len(delta.rows):
                assert scheduled.rows[delta.at].tolist() == delta.rows.tolist()
                assert delta.starts.tolist() == (scheduled.num_computed_tokens[delta.at] // 2).tolist()
        scheduler.update(scheduled, output_of(scheduled))
    scheduler.stats()
    for request in scheduler._running:
        assert [len(blocks) for blocks in request.block_ids] == [4, 4]
    assert len({block for r in scheduler._running for blocks in r.block_ids for block in blocks}) == 16
