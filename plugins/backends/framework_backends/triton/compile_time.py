"""How long Triton has compiled for: its compiler tells a listener what each kernel took."""

from __future__ import annotations

from typing import Any

from triton import knobs


class CompileTime:
    """Seconds since it was made, of every kernel that was not found in Triton's cache on disk."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._told

    def _told(self, *args: Any, **told: Any) -> None:
        self.seconds += told["times"].total / 1e6
        if self._before is not None:
            self._before(*args, **told)
