"""Ctrl-C and SIGTERM of a run: noted between steps, so that what is there can be kept before the run ends.

The runs that step an engine use it; what the exit code becomes is the command line's business.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """number: the signal that asked for an end, None while none did."""

    number: int | None = None

    def end(self) -> None:
        """Raises KeyboardInterrupt of the signal if there was one."""
        if self.number is not None:
            raise KeyboardInterrupt(self.number)


@contextmanager
def held_signals() -> Iterator[Stop]:
    """Notes the first of these signals; a second one raises KeyboardInterrupt at once, wherever the program is.

    Outside of the main thread, where no signal arrives, nothing is held.
    """
    stop = Stop()

    def hold(number: int, frame: Any) -> None:
        if stop.number is not None:
            raise KeyboardInterrupt(number)
        stop.number = number

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, hold) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
