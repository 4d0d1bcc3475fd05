"""What the counters count: tokens of prompts against tokens that requests get, and the seconds they are divided by."""

from types import SimpleNamespace

import numpy as np
import pytest

from framework import LLM, SamplingParams
from framework.batch import SchedulerOutput
from framework.engine.progress import Progress
from framework.engine.stats import RequestTimer, StepStats

GREEDY = SamplingParams(temperature=0, max_tokens=3)
WORDS = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=17")


@pytest.mark.parametrize("budget", [1, 2, 4, 64])
def test_chunk_of_one_token_is_prefill_and_a_requests_first_token_is_counted(folder, budget):
    with LLM(folder, overrides=[*WORDS, f"scheduler.max_num_batched_tokens={budget}"]) as llm:
        outputs = llm.generate([[4] * 5, [7]], GREEDY)
        stats = llm.engine.stats()
    assert [o.num_cached_tokens for o in outputs] == [0, 0]
    assert (stats["prefill_tokens"], stats["decode_tokens"]) == (6, 6)


def test_step_counts_its_own_tokens(llm):
    llm.engine.add_request("a", [4, 5], GREEDY)
    found = []
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        step = llm.engine.core.last_step
        found.append((step.num_tokens, step.num_prompt_tokens, step.num_output_tokens))
    assert found == [(2, 2, 1), (1, 0, 1), (1, 0, 1)]


def test_seconds_of_all_steps_are_those_of_prefill_and_decode(llm, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr("framework.engine.core.perf_counter", lambda: float(next(ticks)))
    llm.engine.core.last_step = stats = StepStats()
    llm.engine.core._last_end = 0.0
    llm.generate([[4, 5]], GREEDY)
    # begin, schedule, update and end of a step: three seconds of this clock
    assert (stats.prefill_s, stats.decode_s) == (3.0, 6.0)
    assert stats.seconds["schedule"] == stats.seconds["update"] == 1.0


def step_of(num_tokens, num_prompt_tokens):
    column = np.array([num_tokens], np.int32)
    return SchedulerOutput(
        0, column, column, column, column > 0, np.zeros(1, np.int32), num_prompt_tokens=num_prompt_tokens
    )


def test_rates_divide_tokens_by_the_seconds_of_the_steps_that_made_them():
    stats = StepStats()
    stats.record(step_of(7, 7), 1, {}, wall_s=9.0)  # before the progress begins
    with Progress(3, SimpleNamespace(core=SimpleNamespace(last_step=stats)), show=False) as progress:
        assert progress.rates() == (0.0, 0.0)
        stats.record(step_of(100, 100), 2, {}, wall_s=2.0)
        assert progress.rates() == (50.0, 0.0)
        stats.record(step_of(2, 0), 2, {}, wall_s=0.5)
        stats.record(step_of(22, 20), 2, {}, wall_s=1.0)  # mixed: its decodes rode along
        stats.record(step_of(2, 0), 4, {}, wall_s=0.5)  # two tokens a row
        assert progress.rates() == (40.0, 6.0)


def test_times_between_tokens_of_several_completions_are_those_within_each():
    timer = RequestTimer(arrival_time=0.0, added=10.0, n=3)
    timer.tokens(12.0, 1, 11.0, 1)
    timer.tokens(13.0, 1, 11.0, 0)
    timer.tokens(15.0, 2, 11.0, 1)
    assert timer.snapshot().tpot == 1.5  # of completion 1 alone: no other has two tokens
    timer.tokens(17.0, 1, 11.0, 0)
    timer.tokens(18.0, 1, 11.0, 2)
    timer.finish(18.0)
    m = timer.metrics
    assert (m.queue_time, m.ttft, m.e2e) == (1.0, 2.0, 8.0)
    assert m.itl == [3.0, 0.0, 4.0]
    assert m.tpot == (1.5 + 4.0) / 2


def test_tpot_of_completions_of_one_token_is_none():
    timer = RequestTimer(arrival_time=0.0, added=0.0, n=2)
    timer.tokens(1.0, 1, 0.5, 0)
    timer.tokens(2.0, 1, 0.5, 1)
    timer.finish(2.0)
    assert (timer.metrics.tpot, timer.metrics.itl) == (None, [])


@pytest.mark.parametrize("indices", [[0], [1, 0, 2]])
def test_moments_of_several_steps_count_like_each_for_itself(indices):
    moments = [3.0, 4.5, 7.25]
    one, other = RequestTimer(0.0, added=1.0, n=3), RequestTimer(0.0, added=1.0, n=3)
    for timer in (one, other):
        timer.tokens(2.0, 1, 1.5, 1)
    for now, index in [(now, index) for now in moments for index in indices]:
        one.tokens(now, 1, 1.5, index)
    other.steps(moments, [1.5, 2.75], 1.5, indices)
    for timer in (one, other):
        timer.finish(9.0)
    assert other.metrics == one.metrics and len(one.metrics.itl) == len(indices) * 3 - (2 if 1 in indices else 1)


def test_steps_are_counted_by_the_tokens_that_they_computed(llm):
    llm.generate([[4, 5]], GREEDY)
    assert llm.engine.core.last_step.steps_by_tokens == {2: 1, 1: 2}


def test_times_of_requests_are_told_while_they_run(llm):
    llm.engine.add_request("a", [4, 5], GREEDY.replace(output_kind="delta"))
    [(request, before)] = llm.engine.times()
    assert (request.request_id, before.ttft) == ("a", None)
    llm.engine.step()
    [(_, times)] = llm.engine.times()
    assert times.ttft > 0
    llm.engine.abort("a")
    assert llm.engine.times() == []
