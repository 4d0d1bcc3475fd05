"""Parts of a step: host seconds always, ranges of a trace while a profiler is on."""

from __future__ import annotations

from time import sleep

from torch.profiler import ProfilerActivity, profile

from framework.worker.step_clock import StepClock, ranged


def step() -> StepClock:
    clock = StepClock("rows")
    sleep(0.02)
    clock.mark("rows", then="prepare")
    clock.mark("prepare", then="post")
    clock.mark("post")
    sleep(0.02)
    clock.mark("wait", then="post")
    sleep(0.02)
    clock.mark("post")
    return clock


def traced() -> list[tuple[str, float]]:
    """(name, microseconds) of each range of a step in a trace, in the order of their beginning."""
    with profile(activities=[ProfilerActivity.CPU]) as on:
        ranged("execute", step)
    found = sorted(on.events(), key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in found]


def test_seconds_of_a_part_run_from_the_mark_before_it() -> None:
    seconds = step().seconds
    assert list(seconds) == ["rows", "prepare", "post", "wait"]
    assert min(seconds[part] for part in ("rows", "wait", "post")) >= 0.02 > seconds["prepare"]


def test_parts_are_ranges_of_a_trace_as_far_as_they_are_named() -> None:
    found = traced()
    assert [name for name, _ in found] == ["execute", "rows", "prepare", "post", "post"]
    whole, rows, *_, post = (us for _, us in found)
    assert min(rows, post) >= 20000 and whole >= 60000


def test_a_range_gives_what_its_call_gives() -> None:
    def call(a: int, b: int) -> tuple[int, int]:
        return a, b

    assert ranged("schedule", call, 1, b=2) == (1, 2)
    with profile(activities=[ProfilerActivity.CPU]) as on:
        assert ranged("update", call, 3, 4) == (3, 4)
    assert [event.name for event in on.events()] == ["update"]
