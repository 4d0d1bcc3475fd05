"""The parts of a step, timed by the host's clock, and as ranges of torch's profiler while one is on.

A range is what a trace shows above the operators or kernels of a part. The step loop and the runner name the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

from torch.autograd import profiler

_NOTHING = nullcontext()


def ranges() -> Callable[[str], AbstractContextManager[Any]]:
    """What makes a context of a part's name: to be asked for once a step, since it costs nothing without a profiler."""
    return profiler.record_function if profiler._is_profiler_enabled else _no_range


def _no_range(name: str) -> AbstractContextManager[Any]:
    return _NOTHING


class StepClock:
    """Host seconds of the parts of one step, each from the mark before it to its own; a part may come again.

    The part that begins is a range in a trace; it ends with its mark.
    """

    __slots__ = ("_last", "_range", "_ranges", "seconds")

    def __init__(self, part: str) -> None:
        self.seconds: dict[str, float] = {}
        self._ranges = ranges()
        self._range: AbstractContextManager[Any] = _NOTHING
        self._begin(part)
        self._last = perf_counter()

    def mark(self, part: str, then: str | None = None) -> None:
        """`part` ends here; `then` names the one that begins, if it is to be a range."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
        self._range.__exit__(None, None, None)
        self._range = _NOTHING
        if then is not None:
            self._begin(then)

    def _begin(self, part: str) -> None:
        self._range = self._ranges(part)
        self._range.__enter__()
