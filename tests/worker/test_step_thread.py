"""Steps that run on a thread of their own, one after the other, and those behind one that failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from framework.worker.step_thread import StepThread


class Immediate:
    """An executor that has done a step when `execute` returns; step ids in `failing` raise."""

    def __init__(self, failing=()):
        self.failing, self.ran = failing, []

    def execute(self, scheduled):
        self.ran.append(scheduled.step_id)
        if scheduled.step_id in self.failing:
            raise ValueError(f"step {scheduled.step_id}")
        return SimpleNamespace(result=lambda: scheduled.step_id)

    def stop(self):
        self.ran.append("stop")


@pytest.fixture
def started():
    """started(failing) -> (executor behind a thread, the one it runs); stopped at the end."""
    threads = []

    def start(failing=()):
        inner = Immediate(failing)
        threads.append(StepThread(inner))
        return threads[-1], inner

    yield start
    for thread in threads:
        thread.stop()


def steps(*ids):
    return [SimpleNamespace(step_id=i) for i in ids]


def test_steps_run_in_order(started):
    thread, inner = started()
    futures = [thread.execute(step) for step in steps(0, 1)]
    assert [future.result() for future in futures] == inner.ran == [0, 1]


def test_steps_behind_one_that_failed_are_not_run(started):
    thread, inner = started(failing=[1])
    futures = [thread.execute(step) for step in steps(0, 1, 2)]
    assert futures[0].result() == 0
    with pytest.raises(ValueError, match="step 1"):
        futures[1].result()
    with pytest.raises(RuntimeError, match="step 2 was not run: a step before it failed"):
        futures[2].result()
    assert inner.ran == [0, 1]


def test_step_given_before_the_failed_ones_are_taken_back_is_not_run_and_one_behind_them_is(started):
    thread, inner = started(failing=[0])
    failed = thread.execute(*steps(0))
    with pytest.raises(ValueError, match="step 0"):
        failed._future.result()  # it has failed, and the engine has not seen it
    behind = thread.execute(*steps(1))
    for future in (failed, behind):
        with pytest.raises((ValueError, RuntimeError)):
            future.result()
    assert thread.execute(*steps(2)).result() == 2
    assert inner.ran == [0, 2]
