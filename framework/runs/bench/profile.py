"""`run.profile=FILE.json`: one more round of a benchmark, a few steps of it under torch's profiler.

Writes the trace, which browsers show (chrome://tracing, ui.perfetto.dev); what it says of a step is `trace_figures`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError
from framework.runs.bench.trace_figures import BEGIN, END, TraceFigures, figures_of

if TYPE_CHECKING:
    from framework.engine.engine import Engine
    from framework.interfaces import Bench

NUM_STEPS, NUM_WARM = 16, 4
"""Steps that are told of, and steps before them with the profiler on already: it takes a while to start."""


def check_profile(path: str, bench: Bench, name: str) -> None:
    """ConfigError when nothing could be profiled or the trace could not be written, said before anything runs."""
    if not bench.needs_engine:
        raise ConfigError(f"run.profile={path}: bench={name} runs no engine in this process. Use another workload")
    try:
        Path(path).open("ab").close()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"run.profile={path}: {reason}. Name a file in a folder that can be written") from None


def profile_round(
    path: str, bench: Bench, engine: Engine, number: int, advance: Callable[[int], Any], steps_a_round: int
) -> TraceFigures:
    """Runs a round, writes the trace of steps in its middle, and returns their figures."""
    num_warm = min(NUM_WARM, steps_a_round // 4)
    window = _Window(engine, advance, max(0, (steps_a_round - num_warm - NUM_STEPS) // 2), num_warm)
    try:
        bench.round(engine, number, window)
    finally:
        window.close()
    if not window.num_steps:
        raise ConfigError(f"run.profile={path}: this round had fewer steps than the one before it. Make it longer")
    window.profiler.export_chrome_trace(path)
    return figures_of(json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"], window.num_steps)


class _Window:
    """Called between the steps of a round: the profiler is on from step `first` on, and tells of those behind
    `num_warm` more.

    num_steps  how many are told of: fewer than NUM_STEPS in a short round
    """

    def __init__(self, engine: Engine, advance: Callable[[int], Any], first: int, num_warm: int) -> None:
        from torch.profiler import profile, supported_activities

        # Steps may run on a thread of their own, which the profiler looks at only when it is asked to.
        self.profiler = profile(activities=list(supported_activities()), experimental_config=_every_thread())
        self._stats, self._advance, self._before = engine.core.last_step, advance, engine.core.last_step.num_steps
        self._first, self._told_from = first, first + num_warm
        self._is_on = self._is_told = self._is_done = False
        self.num_steps = 0
        self._look(0)

    def __call__(self, num_done: int) -> None:
        self._advance(num_done)
        self._look(self._stats.num_steps - self._before)

    def _look(self, step: int) -> None:
        """After so many steps of the round."""
        if self._is_done:
            return
        if not self._is_on and step >= self._first:
            self.profiler.start()
            self._is_on = True
        if self._is_told:
            self.num_steps = step - self._told_from
        elif step >= self._told_from:
            _range(BEGIN)
            self._is_told, self._told_from = True, step
        if self.num_steps >= NUM_STEPS:
            self.close()

    def close(self) -> None:
        """Ends the profile, if the round has not gone on for long enough."""
        if self._is_on and not self._is_done:
            _range(END)
            self.profiler.stop()
        self._is_done = True


def _range(name: str) -> None:
    from torch.profiler import record_function

    with record_function(name):
        pass


def _every_thread() -> Any:
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)
