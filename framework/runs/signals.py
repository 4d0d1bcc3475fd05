"""Ctrl-C and SIGTERM of a run: noted between steps, so that what is there can be kept before the run ends.

The runs that step an engine use it; what the exit code becomes is the command line's business.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from framework.ending import SIGNALS, interrupt


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
    """Notes the first of these signals; a second one does what it would have done before, or raises KeyboardInterrupt
    where that is nothing of Python's.

    Outside of the main thread, where no signal arrives, nothing is held.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def hold(number: int, frame: Any) -> None:
        if stop.number is None:
            stop.number = number
            return
        earlier = before[signal.Signals(number)]
        if callable(earlier):
            earlier(number, frame)
        interrupt(number, frame)

    with _handled_by(dict.fromkeys(SIGNALS, hold)):
        yield stop


@contextmanager
def raised_signals() -> Iterator[None]:
    """A signal raises KeyboardInterrupt, with its number if it is no Ctrl-C. Only in the main thread."""
    with _handled_by({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: interrupt}):
        yield


@contextmanager
def _handled_by(handlers: Mapping[signal.Signals, Callable[[int, Any], Any]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
