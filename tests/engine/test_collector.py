"""While steps are made the collector passes over what was there before; what is new is collected, and all is as it was
afterwards."""

import gc
import weakref

import pytest

from framework import SamplingParams
from framework.engine.collector import resting_collector
from framework.runs.bench import workload

GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


class Circle:
    def __init__(self):
        self.own = self


def test_garbage_made_meanwhile_is_collected_and_what_was_there_before_afterwards():
    circle = Circle()
    before = weakref.ref(circle)
    with resting_collector():
        del circle
        new = weakref.ref(Circle())
        gc.collect()
        assert new() is None and before() is not None
    gc.collect()
    assert before() is None


def test_rest_lasts_until_the_last_one_inside_of_it_has_ended():
    outer, inner = resting_collector(), resting_collector()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert gc.get_freeze_count()
    inner.__exit__(None, None, None)
    assert not gc.get_freeze_count()


def test_program_that_has_frozen_objects_by_itself_keeps_them_frozen():
    circle = Circle()
    gc.freeze()
    there, circle = weakref.ref(circle), None
    with resting_collector():
        pass
    gc.collect()
    assert there() is not None
    gc.unfreeze()
    gc.collect()
    assert there() is None


def counts_of_steps(llm, monkeypatch):
    """Numbers of frozen objects at each step from now on."""
    counts, step = [], llm.engine.core.step

    def counted():
        counts.append(gc.get_freeze_count())
        return step()

    monkeypatch.setattr(llm.engine.core, "step", counted)
    return counts


def test_collector_rests_during_a_call_that_waits_for_its_outputs(llm, monkeypatch):
    counts = counts_of_steps(llm, monkeypatch)
    llm.generate([[4], [5]], GREEDY, use_tqdm=False)
    assert len(counts) >= 3 and all(counts) and gc.get_freeze_count() == 0


def test_collector_is_itself_again_after_a_step_that_failed(llm, monkeypatch):
    def fail():
        raise RuntimeError("boom")

    monkeypatch.setattr(llm.engine.core, "step", fail)
    with pytest.raises(RuntimeError, match="boom"):
        llm.generate([[4], [5]], GREEDY, use_tqdm=False)
    assert gc.get_freeze_count() == 0


def test_collector_rests_during_a_round_of_a_benchmark(llm, monkeypatch):
    counts = counts_of_steps(llm, monkeypatch)
    work = [workload.Work([4, 5], 3, due=0.0, seed=1)]
    workload.pass_through(llm.engine, work, "salt", False, lambda count: None)
    assert counts and all(counts) and gc.get_freeze_count() == 0
