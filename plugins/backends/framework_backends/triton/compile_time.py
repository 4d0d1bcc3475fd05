"""How long Triton has compiled for: its compiler tells a listener what each kernel took."""

from __future__ import annotations

from threading import Lock
from time import perf_counter
from typing import Any

from triton import knobs


class WallSeconds:
    """Seconds in which something went on, however many at a time. Ends come in about their order, from any thread."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []  # apart from each other
        self._lock = Lock()

    @property
    def total(self) -> float:
        with self._lock:
            return sum(end - start for start, end in self._spans)

    def add(self, start: float, end: float) -> None:
        with self._lock:
            while self._spans and self._spans[-1][1] >= start:
                before = self._spans.pop()
                start, end = min(start, before[0]), max(end, before[1])
            self._spans.append((start, end))


class CompileTime:
    """Seconds since it was made in which kernels were compiled that were not in Triton's cache on disk."""

    def __init__(self) -> None:
        self._wall = WallSeconds()
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._told

    @property
    def seconds(self) -> float:
        return self._wall.total

    def _told(self, *args: Any, **told: Any) -> None:
        now = perf_counter()
        if not told["cache_hit"]:
            self._wall.add(now - told["times"].total / 1e6, now)
        if self._before is not None:
            self._before(*args, **told)
