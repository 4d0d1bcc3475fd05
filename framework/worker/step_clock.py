"""The parts of a step, timed by the host's clock, and as ranges of torch's profiler while one is on.

A range is what a trace shows above the operators or kernels of a part. The step loop and the runner name the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

_P = ParamSpec("_P")
_T = TypeVar("_T")


def ranged(part: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """call(*args), as a range of a trace while a profiler is on."""
    if not profiler._is_profiler_enabled:
        return call(*args, **kwargs)
    with profiler.record_function(part):
        return call(*args, **kwargs)


class StepClock:
    """Host seconds of the parts of one step, each from the mark before it to its own; a part may come again.

    The part that begins is a range in a trace; it ends with its mark.
    """

    __slots__ = ("_is_traced", "_last", "_range", "seconds")

    def __init__(self, part: str) -> None:
        self.seconds: dict[str, float] = {}
        self._range: profiler.record_function | None = None
        self._is_traced = profiler._is_profiler_enabled
        if self._is_traced:
            self._turn_to(part)
        self._last = perf_counter()

    def mark(self, part: str, then: str | None = None) -> None:
        """`part` ends here; `then` names the one that begins, if it is to be a range."""
        now, seconds = perf_counter(), self.seconds
        seconds[part] = seconds.get(part, 0.0) + now - self._last
        self._last = now
        if self._is_traced:
            self._turn_to(then)

    def _turn_to(self, part: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None if part is None else profiler.record_function(part)
        if self._range is not None:
            self._range.__enter__()
