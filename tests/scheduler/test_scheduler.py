"""What one step contains, how requests end, and what is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from framework.batch import LogprobsColumns, StepOutput
from framework.errors import ConfigError, NotBuiltError, RequestError
from framework.interfaces import KVGroup
from framework.interfaces import Scheduler as SchedulerContract
from framework.request import RequestStatus, SamplingParams
from framework.scheduler import Scheduler


def spans(shadow, scheduled):
    """{request name: scheduled tokens} in batch-row order."""
    names = {row: state.request.request_id for row, state in shadow.rows.items()}
    return {names[r]: n for r, n in zip(scheduled.rows.tolist(), scheduled.num_scheduled_tokens.tolist(), strict=True)}


def until_preempted(shadow):
    for _ in range(50):
        if shadow.step().preempted:
            return
    pytest.fail("nobody was preempted within 50 steps")


def result(scheduled, token=7, **fields):
    sampled = np.full((scheduled.num_rows, 1), token, np.int32)
    return StepOutput(sampled, scheduled.samples.astype(np.int32), **fields)


def alone(sim, request, token=7, **limits):
    """The NewTokens of a request that always draws `token`, until it ends."""
    scheduler, news = Scheduler({}, sim.context(**limits)), []
    scheduler.add_request(request)
    while scheduler.has_work():
        scheduled = scheduler.schedule()
        news += scheduler.update(scheduled, result(scheduled, token))
    return news


# ------------------------------------------------------------------------------------------------- one step


def test_scheduler_keeps_its_contract(sim):
    assert isinstance(Scheduler({}, sim.context()), SchedulerContract)


def test_importing_the_scheduler_imports_no_torch():
    code = "import sys, framework.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_step_mixes_decode_resumed_span_and_chunk(sim):
    shadow = sim.Shadow(num_blocks=16, max_num_batched_tokens=12, prefix_caching=False)
    for i in range(12):
        shadow.add(sim.request(f"r{i}", range(i, i + 4 + 6 * (i % 2)), 12, arrival=i))
    mixed = 0
    for _ in range(200):
        scheduled = shadow.step()
        resumed = {new.req_idx for new in scheduled.new if len(new.token_ids) > new.num_prompt_tokens}
        new = {new.req_idx for new in scheduled.new}
        decodes = [row for row in scheduled.rows.tolist() if row not in new]
        has_chunk = not scheduled.samples.all()
        mixed += bool(resumed and decodes and has_chunk and scheduled.num_rows >= 3)
    shadow.drain()
    assert mixed


def test_decodes_go_before_a_prompt(sim):
    shadow = sim.Shadow(max_num_batched_tokens=8)
    for i in range(3):
        shadow.add(sim.request(f"d{i}", [i, i], 9, arrival=i))
    shadow.step()
    shadow.add(sim.request("long", range(30), 1, arrival=3))
    assert spans(shadow, shadow.step()) == {"d0": 1, "d1": 1, "d2": 1, "long": 5}
    assert spans(shadow, shadow.step()) == {"d0": 1, "d1": 1, "d2": 1, "long": 5}
    shadow.drain()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_decode_is_ever_left_out_for_a_prompt(sim, in_flight):
    shadow = sim.Shadow(max_num_batched_tokens=6, max_num_seqs=5, max_in_flight=in_flight, num_blocks=80)
    for i in range(12):
        shadow.add(sim.request(f"r{i}", range(i, i + 3 + 5 * (i % 3)), 7, arrival=i))
    while shadow.scheduler.has_work():
        ready = {
            r.request_id
            for r in shadow.scheduler._running
            if r.num_tokens + r.num_in_flight - r.num_computed_tokens == 1
            and r.num_tokens + r.num_in_flight < r.max_total_tokens
        }
        got = spans(shadow, shadow.issue())
        assert ready <= got.keys()
        if len(shadow.in_flight) == in_flight:
            finished = [new for new in shadow.commit() if new.finish_reason]
            assert all(new.request.req_idx == -1 for new in finished)
    shadow.drain()


def test_budget_may_be_below_the_number_of_sequences(sim):
    shadow = sim.Shadow(max_num_batched_tokens=2, max_num_seqs=8)
    for i in range(5):
        shadow.add(sim.request(f"r{i}", range(i, i + 4), 3, arrival=i))
    shadow.drain()


def test_prompt_is_cut_to_the_budget_and_samples_at_its_end_only(sim):
    shadow = sim.Shadow(max_num_batched_tokens=6)
    shadow.add(sim.request("a", range(14), 1))
    steps = [shadow.step() for _ in range(3)]
    assert [int(s.num_scheduled_tokens[0]) for s in steps] == [6, 6, 2]
    assert [int(s.num_computed_tokens[0]) for s in steps] == [0, 6, 12]
    assert [bool(s.samples[0]) for s in steps] == [False, False, True]
    assert [s.max_seq_len for s in steps] == [6, 12, 14]


def test_without_chunked_prefill_a_prompt_is_whole_or_waits(sim):
    shadow = sim.Shadow(chunked_prefill=False, max_num_batched_tokens=10)
    shadow.add(sim.request("a", range(6), 2))
    shadow.add(sim.request("b", range(20, 30), 2, arrival=1))
    got = [spans(shadow, shadow.step()) for _ in range(3)]
    assert got == [{"a": 6}, {"a": 1}, {"b": 10}]
    shadow.drain()


def test_resumed_span_beyond_the_budget_comes_back_in_pieces(sim):
    shadow = sim.Shadow(chunked_prefill=False, max_num_batched_tokens=8, num_blocks=9, prefix_caching=False)
    shadow.add(sim.request("a", range(4), 24))
    shadow.add(sim.request("b", range(20, 24), 24, arrival=1))
    until_preempted(shadow)
    assert shadow.requests["b"].num_tokens > 8
    shadow.drain()


def test_admission_hands_over_every_block_of_the_known_tokens(sim):
    shadow = sim.Shadow(max_num_batched_tokens=4)
    shadow.add(sim.request("a", range(10), 3))
    scheduled = shadow.step()
    (delta,) = scheduled.new_block_ids
    assert (delta.rows.tolist(), delta.starts.tolist(), delta.counts.tolist()) == ([1], [0], [3])
    assert delta.ids.tolist() == [1, 2, 3]
    assert len(shadow.step().new_block_ids[0].ids) == 0
    shadow.drain()


def test_decode_gets_a_block_when_it_enters_one(sim):
    shadow = sim.Shadow()
    shadow.add(sim.request("a", range(4), 6))
    shadow.step()
    (delta,) = shadow.step().new_block_ids
    assert (delta.starts.tolist(), delta.counts.tolist(), delta.ids.tolist()) == ([1], [1], [2])
    shadow.drain()


def test_cached_blocks_are_part_of_the_block_list(sim):
    shadow = sim.Shadow()
    shadow.add(sim.request("a", range(9), 1))
    shadow.drain()
    shadow.add(sim.request("b", range(9), 1, arrival=1))
    scheduled = shadow.step()
    assert scheduled.new[0].num_computed_tokens == 8 and scheduled.new_block_ids[0].counts.tolist() == [3]
    assert scheduled.num_scheduled_tokens.tolist() == [1]
    shadow.drain()


def test_every_group_has_its_own_blocks(sim):
    shadow = sim.Shadow(num_groups=2)
    shadow.add(sim.request("a", range(6), 4))
    first, second = shadow.step().new_block_ids
    assert not set(first.ids.tolist()) & set(second.ids.tolist()) and len(first.ids) == len(second.ids) == 2
    shadow.drain()


def test_steps_count_from_zero_and_travel_as_plain_objects(sim):
    shadow = sim.Shadow()
    shadow.add(sim.request("a", range(6), 3))
    steps = [shadow.step() for _ in range(3)]
    assert [s.step_id for s in steps] == [0, 1, 2]
    copy = pickle.loads(pickle.dumps(steps[0]))
    assert copy.new[0].token_ids.tolist() == list(range(6)) and copy.rows.tolist() == [1]


def test_rows_leave_with_the_next_step_and_may_be_reused_in_it(sim):
    shadow = sim.Shadow(max_num_seqs=1)
    shadow.add(sim.request("a", range(4), 1))
    shadow.add(sim.request("b", range(4), 1, arrival=1))
    shadow.step()
    second = shadow.step()
    assert second.finished == [1] and [new.req_idx for new in second.new] == [1]
    last = shadow.issue()
    assert last.finished == [1] and last.num_rows == 0 and last.max_seq_len == 0
    shadow.commit()


def test_stats_count_requests_blocks_and_hits(sim):
    shadow = sim.Shadow(max_num_seqs=1)
    shadow.add(sim.request("a", range(9), 1))
    shadow.add(sim.request("b", range(9), 1, arrival=1))
    shadow.step()
    assert shadow.scheduler.stats() == {
        "num_waiting": 1,
        "num_running": 0,
        "num_free_blocks": 32,
        "num_cached_blocks": 2,
        "num_blocks": 33,
        "num_free_swap_blocks": 0,
        "num_swap_blocks": 0,
        "num_preemptions": 0,
        "num_swap_outs": 0,
        "num_swap_fallbacks": 0,
        "num_failed_loads": 0,
        "prefix_hit_tokens": 0,
        "connector_hit_tokens": 0,
        "prefix_query_tokens": 9,
        "prefix_recomputed_tokens": 0,
    }
    shadow.drain()
    stats = shadow.scheduler.stats()
    assert (stats["prefix_hit_tokens"], stats["prefix_query_tokens"]) == (8, 18)


# -------------------------------------------------------------------------------------------------- endings


def test_eos_ends_with_stop_and_no_reason(sim):
    (new,) = alone(sim, sim.request("a", range(4), 9, eos_token_ids=frozenset([7]), stop_token_ids=frozenset([7])))
    assert (new.token_ids, new.finish_reason, new.stop_reason) == ([7], "stop", None)
    assert new.request.status is RequestStatus.FINISHED and new.request.output_token_ids == [7]


def test_stop_id_ends_with_its_id(sim):
    (new,) = alone(sim, sim.request("a", range(4), 9, stop_token_ids=frozenset([7])))
    assert (new.token_ids, new.finish_reason, new.stop_reason) == ([7], "stop", 7)
    assert (new.request.finish_reason, new.request.stop_reason) == ("stop", 7)


def test_length_ends_at_max_total_tokens(sim):
    news = alone(sim, sim.request("a", range(4), 3))
    assert [new.finish_reason for new in news] == [None, None, "length"]
    assert news[-1].request.num_tokens == 7 and news[-1].stop_reason is None


def test_stop_goes_before_length_on_one_token(sim):
    (new,) = alone(sim, sim.request("a", range(4), 1, stop_token_ids=frozenset([7])))
    assert (new.finish_reason, new.stop_reason) == ("stop", 7)


@pytest.mark.parametrize(
    "stop, taken, reason",
    [
        ([12], [10, 11, 12], "stop"),
        ([22], [10, 11, 12, 20, 21], "length"),
        ([], [10, 11, 12, 20, 21], "length"),
    ],
)
def test_tokens_of_one_step_end_at_the_first_ending(sim, stop, taken, reason):
    scheduler = Scheduler({}, sim.context())
    scheduler.add_request(sim.request("a", range(4), 5, stop_token_ids=frozenset(stop)))
    scheduled = scheduler.schedule()
    output = StepOutput(np.array([[10, 11, 12, 20, 21, 22]], np.int32), np.array([6], np.int32))
    (new,) = scheduler.update(scheduled, output)
    assert (new.token_ids, new.finish_reason) == (taken, reason)


def test_error_ends_its_request_alone(sim):
    shadow = sim.Shadow()
    for i, name in enumerate("abc"):
        shadow.add(sim.request(name, range(i, i + 5), 4, arrival=i))
    shadow.step()
    shadow.errors["b"] = "row 1: every token is masked"
    shadow.drain()
    (new,) = [new for new in shadow.news if new.error]
    assert (new.request.request_id, new.token_ids, new.finish_reason) == ("b", [], "error")
    assert new.request.error == new.error == "row 1: every token is masked"
    assert [shadow.requests[name].finish_reason for name in "ac"] == ["length", "length"]


def test_unfinished_chunk_gives_nothing(sim):
    shadow = sim.Shadow(max_num_batched_tokens=4)
    shadow.add(sim.request("a", range(6), 1))
    shadow.issue()
    assert shadow.commit() == []
    shadow.issue()
    assert len(shadow.commit()) == 1


def test_logprobs_row_counts_sampled_tokens_in_batch_order(sim):
    scheduler = Scheduler({}, sim.context(max_num_batched_tokens=20))
    plain, asking = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, logprobs=1)
    for i, params in enumerate((asking, plain, asking, asking)):
        scheduler.add_request(sim.request(f"r{i}", range(i, i + 6), params=params, arrival=i))
    ids, ranks = np.zeros((3, 1), np.int32), np.ones((3, 1), np.int32)
    columns = LogprobsColumns(np.zeros(3, np.float32), ranks[:, 0], ids, np.zeros((3, 1), np.float32), ranks)
    scheduled = scheduler.schedule()
    assert scheduled.samples.tolist() == [True, True, True, False]
    news = scheduler.update(scheduled, result(scheduled, logprobs=columns))
    assert [(new.request.request_id, new.logprobs_row) for new in news] == [("r0", 0), ("r1", -1), ("r2", 2)]
    scheduled = scheduler.schedule()
    output = result(scheduled, logprobs=columns, errors={1: "empty"})
    output.num_valid[1] = 0
    news = scheduler.update(scheduled, output)
    assert [(new.request.request_id, new.logprobs_row) for new in news] == [("r0", 0), ("r1", -1), ("r2", 1), ("r3", 2)]
    scheduled = scheduler.schedule()
    assert [new.logprobs_row for new in scheduler.update(scheduled, result(scheduled))] == [-1] * 3


def test_row_that_should_sample_must_return_a_token(sim):
    scheduler = Scheduler({}, sim.context())
    scheduler.add_request(sim.request("a", range(4)))
    scheduled = scheduler.schedule()
    with pytest.raises(AssertionError, match="request a: its row samples"):
        scheduler.update(scheduled, StepOutput(np.zeros((1, 1), np.int32), np.zeros(1, np.int32)))


# ---------------------------------------------------------------------------------------------------- abort


def test_abort_of_a_waiting_request(sim):
    shadow = sim.Shadow(max_num_seqs=1)
    shadow.add(sim.request("a", range(4)))
    shadow.add(sim.request("b", range(4), arrival=1))
    shadow.step()
    assert shadow.abort("b").finish_reason == "abort"
    shadow.drain()
    assert shadow.tokens_of("b") == [] and shadow.abort("b") is None


def test_abort_of_a_running_request_frees_its_blocks(sim):
    shadow = sim.Shadow()
    shadow.add(sim.request("a", range(9), 9))
    shadow.step()
    request = shadow.abort("a")
    assert request.status is RequestStatus.FINISHED and shadow.scheduler.pool.num_free == 32
    assert shadow.issue().aborted == [1] and not shadow.scheduler.has_work()
    shadow.commit()


def test_blocks_of_a_request_aborted_in_flight_are_free_when_its_step_is_done(sim):
    shadow = sim.Shadow()
    shadow.add(sim.request("a", range(9), 9))
    shadow.issue()
    shadow.abort("a")
    assert shadow.scheduler.pool.num_free == 29 and shadow.scheduler.stats()["num_running"] == 0
    assert shadow.commit() == [] and shadow.scheduler.pool.num_free == 32
    assert shadow.scheduler.pool.published() == {}


def test_id_may_be_used_again_after_an_abort_in_flight(sim):
    shadow = sim.Shadow(max_in_flight=2)
    shadow.add(sim.request("a", range(9), 9))
    shadow.issue()
    shadow.abort("a")
    shadow.add(sim.request("a", range(20, 25), 3, arrival=1))
    shadow.drain()


def test_unknown_id_is_not_aborted(sim):
    assert Scheduler({}, sim.context()).abort("nobody") is None


# ----------------------------------------------------------------------------------------------- preemption


def test_preempted_request_resumes_with_the_same_tokens(sim):
    shadow = sim.Shadow(num_blocks=7)
    shadow.add(sim.request("a", range(8), 12))
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1))
    resumed = []
    while shadow.scheduler.has_work():
        resumed += [new for new in shadow.step().new if len(new.token_ids) > new.num_prompt_tokens]
    shadow.drain()
    assert [new.request_id for new in resumed] == ["b"] and shadow.requests["b"].num_preemptions == 1
    assert shadow.scheduler.stats()["num_preemptions"] == 1


def test_preempted_request_keeps_its_place_by_arrival(sim):
    shadow = sim.Shadow(num_blocks=7, max_num_seqs=2)
    shadow.add(sim.request("a", range(8), 12))
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1))
    shadow.add(sim.request("c", range(40, 41), 1, arrival=2))
    until_preempted(shadow)
    assert [r.request_id for r in shadow.scheduler._waiting] == ["b", "c"]
    shadow.drain()


def test_preemption_leaves_num_cached_tokens_as_it_was(sim):
    shadow = sim.Shadow(num_blocks=7)
    shadow.add(sim.request("a", range(8), 12))
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1))
    shadow.drain()
    b = shadow.requests["b"]
    assert b.num_preemptions == 1 and b.num_cached_tokens == 0
    assert b.first_scheduled_time is not None


def test_admission_leaves_a_block_for_each_request_that_grows(sim):
    shadow = sim.Shadow(num_blocks=5)
    shadow.add(sim.request("a", range(8), 8))
    shadow.step()
    shadow.add(sim.request("b", range(20, 28), 1, arrival=1))
    assert not shadow.step().new  # two blocks are free, but a is about to need one
    shadow.drain()
    assert shadow.scheduler.stats()["num_preemptions"] == 0


def test_requests_that_fill_the_pool_exactly_all_run_at_once(sim):
    shadow = sim.Shadow(num_blocks=9, max_num_seqs=8)
    for i in range(8):
        shadow.add(sim.request(f"r{i}", [i, i], 2, arrival=i))
    assert shadow.step().num_rows == 8
    shadow.drain()


# ------------------------------------------------------------------------------------------------ in flight


def test_decode_is_scheduled_one_step_ahead_of_its_token(sim):
    shadow = sim.Shadow(max_in_flight=2)
    shadow.add(sim.request("a", range(6), 5))
    request = shadow.requests["a"]
    shadow.issue()
    assert (request.num_tokens, request.num_computed_tokens, request.num_in_flight) == (6, 6, 1)
    second = shadow.issue()
    assert (second.num_computed_tokens.tolist(), second.samples.tolist()) == ([6], [True])
    assert (request.num_tokens, request.num_computed_tokens, request.num_in_flight) == (6, 7, 2)
    shadow.drain()


@pytest.mark.parametrize("in_flight", (1, 2))
def test_decodes_go_on_until_one_arrives_or_leaves(sim, in_flight):
    shadow = sim.Shadow(max_in_flight=in_flight)
    for name in "ab":
        shadow.add(sim.request(name, [1, 2, 3], 30))
    going = []

    def step():
        while len(shadow.in_flight) < in_flight:
            going.append(shadow.issue().goes_on)
        shadow.commit()

    for _ in range(10):
        step()
    assert going[:2] == [False, False] and all(going[2:])
    shadow.add(sim.request("c", [1, 2, 3], 30))
    going.clear()
    for _ in range(8):
        step()
    assert going[:2] == [False, False] and all(going[2:])  # c arrives, then c decodes with the others
    shadow.abort("a")
    going.clear()
    for _ in range(6):
        step()
    assert going[0] is False and all(going[1:])
    shadow.errors["b"] = "broken"
    step()
    going.clear()
    for _ in range(in_flight + 3):
        step()
    assert False in going and going[-1] is True
    shadow.drain()


def test_request_that_may_be_at_its_limit_is_not_scheduled_beyond_it(sim):
    shadow = sim.Shadow(max_in_flight=2)
    shadow.add(sim.request("a", range(6), 1))
    assert shadow.issue().num_rows == 1
    assert shadow.issue().num_rows == 0
    shadow.drain()


def test_tokens_after_an_unforeseen_stop_are_dropped(sim):
    shadow = sim.Shadow(max_in_flight=2)
    request = sim.request("a", range(6), 9)
    stop = sim.expected_output(request)[0][0]
    shadow.add(replace(request, stop_token_ids=frozenset([stop])))
    shadow.issue()
    shadow.issue()
    assert [new.finish_reason for new in shadow.commit()] == ["stop"]
    assert shadow.scheduler.pool.num_free == 30, "the second step still writes its blocks"
    assert shadow.commit() == [] and shadow.scheduler.pool.num_free == 32
    shadow.drain()


def test_row_is_not_reused_while_a_step_in_flight_names_it(sim):
    shadow = sim.Shadow(max_in_flight=2, max_num_seqs=1)
    request = sim.request("a", range(6), 9)
    shadow.add(replace(request, stop_token_ids=frozenset(range(sim.vocab))))
    shadow.issue()
    shadow.issue()
    shadow.commit()
    shadow.add(sim.request("b", range(6), 2, arrival=1))
    third = shadow.issue()
    assert third.finished == [1] and third.new == []
    shadow.commit()
    assert [new.req_idx for new in shadow.issue().new] == [1]
    shadow.drain()


def test_preempted_in_flight_drops_the_token_and_draws_it_again(sim):
    shadow = sim.Shadow(max_in_flight=2, num_blocks=7)
    shadow.add(sim.request("a", range(8), 12))
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1))
    shadow.drain()
    assert shadow.requests["b"].num_preemptions == 1


def test_request_waits_for_blocks_that_an_ending_one_gives_back(sim):
    shadow = sim.Shadow(max_in_flight=2, num_blocks=6)
    shadow.add(sim.request("a", range(8), 8))
    shadow.add(sim.request("b", range(20, 23), 5, arrival=1))
    steps = [shadow.step() for _ in range(6)]
    assert steps[5].num_rows == 0, "a has no block for its 13th token, and b's last token is in flight"
    shadow.drain()
    assert shadow.scheduler.stats()["num_preemptions"] == 0


def test_steps_come_back_in_order(sim):
    scheduler = Scheduler({}, sim.context(max_in_flight=2))
    scheduler.add_request(sim.request("a", range(4)))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1 comes back before step 0"):
        scheduler.update(second, result(second))
    with pytest.raises(AssertionError, match="2 steps in flight already"):
        scheduler.schedule()
    scheduler.update(first, result(first))


def test_step_tells_how_many_of_its_tokens_stand_in_a_prompt(sim):
    shadow = sim.Shadow(max_num_batched_tokens=4, num_blocks=9)
    shadow.add(sim.request("a", range(5), 4))
    shadow.add(sim.request("b", [9], 3, arrival=1))
    found = [(step.num_tokens, step.num_prompt_tokens) for step in (shadow.step() for _ in range(4))]
    assert found == [(4, 4), (2, 2), (2, 0), (2, 0)]


def test_prompt_of_a_resumed_request_counts_again_and_its_outputs_do_not(sim):
    shadow = sim.Shadow(num_blocks=7, prefix_caching=False)
    shadow.add(sim.request("a", range(8), 12))
    shadow.add(sim.request("b", range(20, 28), 12, arrival=1))
    resumed = []
    while shadow.scheduler.has_work():
        step = shadow.step()
        resumed += [(len(n.token_ids), step.num_prompt_tokens) for n in step.new if len(n.token_ids) > 8]
    assert resumed and all(prompt == 8 for _, prompt in resumed)
    shadow.drain()


# ------------------------------------------------------------------------------------------------- refusals


def test_request_that_never_fits_is_refused_with_both_numbers(sim):
    scheduler = Scheduler({}, sim.context(num_blocks=4))
    scheduler.add_request(sim.request("fits", range(8), 4))
    with pytest.raises(RequestError, match=r"13 tokens and need 4 blocks, but the pool has 3\. Raise"):
        scheduler.add_request(sim.request("big", range(8), 5))
    with pytest.raises(RequestError, match="13 tokens and need 4 blocks"):
        scheduler.check_request(sim.request("big", range(8), 5))
    scheduler.check_request(sim.request("would fit", range(8), 4))
    assert scheduler.stats()["num_waiting"] == 1


def test_long_prompt_without_chunked_prefill_is_refused_by_name(sim):
    scheduler = Scheduler({}, sim.context(chunked_prefill=False, max_num_batched_tokens=8))
    scheduler.add_request(sim.request("fits", range(8)))
    with pytest.raises(RequestError, match=r"prompt has 9 tokens but scheduler.max_num_batched_tokens is 8"):
        scheduler.add_request(sim.request("long", range(9)))


def test_id_in_use_is_refused(sim):
    scheduler = Scheduler({}, sim.context())
    scheduler.add_request(sim.request("a", range(4)))
    with pytest.raises(RequestError, match="request a: the id is in use"):
        scheduler.add_request(sim.request("a", range(4), arrival=1))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"groups": (KVGroup("a"), KVGroup("b", block_size=8))}, r"different block sizes \[8, 16\]"),
        ({"num_lookahead": 3}, "no slots for 3 draft tokens yet. Use spec_decode=none"),
    ],
)
def test_what_is_not_built_is_refused_by_name(sim, changes, message):
    with pytest.raises(NotBuiltError, match=message):
        Scheduler({}, sim.context(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_blocks": 1}, "kv_cache.num_blocks must be at least 2, got 1"),
        ({"max_num_seqs": 0}, "scheduler.max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "scheduler.max_num_batched_tokens must be at least 1, got 0"),
    ],
)
def test_limit_too_low_is_refused(sim, changes, message):
    with pytest.raises(ConfigError, match=message):
        Scheduler({}, sim.context(**changes))


def test_option_is_refused_by_name(sim):
    with pytest.raises(ConfigError, match="has no option 'speed'"):
        Scheduler({"speed": 1}, sim.context())
