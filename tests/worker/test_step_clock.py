"""Parts of a step: host seconds always, ranges of a trace while a profiler is on."""

from __future__ import annotations

from time import sleep

from torch.profiler import ProfilerActivity, profile

from framework.worker.step_clock import StepClock, ranges


def step() -> StepClock:
    clock = StepClock("rows")
    sleep(0.02)
    clock.mark("rows", then="prepare")
    clock.mark("prepare", then="forward")
    clock.pause()
    sleep(0.02)
    clock.mark("forward")
    sleep(0.02)
    clock.mark("post")
    return clock


def traced() -> list[tuple[str, float]]:
    """(name, microseconds) of each range of a step in a trace, in the order of their beginning."""
    with profile(activities=[ProfilerActivity.CPU]) as on, ranges()("execute"):
        step()
    found = sorted(on.events(), key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in found]


def test_seconds_of_a_part_run_from_the_mark_before_it() -> None:
    seconds = step().seconds
    assert list(seconds) == ["rows", "prepare", "forward", "post"]
    assert min(seconds[part] for part in ("rows", "forward", "post")) >= 0.02 > seconds["prepare"]


def test_parts_are_ranges_of_a_trace_as_far_as_they_are_named() -> None:
    assert [name for name, _ in traced()] == ["execute", "rows", "prepare", "forward"]


def test_a_range_that_is_paused_ends_there() -> None:
    times = dict(traced())
    assert times["rows"] >= 20000 > times["forward"]
    assert times["execute"] >= sum(times[name] for name in ("rows", "prepare", "forward"))


def test_without_a_profiler_a_range_is_nothing() -> None:
    assert ranges()("schedule") is ranges()("update")
    with ranges()("schedule"):
        pass
