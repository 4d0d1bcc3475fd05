"""Ctrl-C between steps: a step that is cut in the middle would leave scheduler and rows in disagreement.

Used by the offline API around its loop; it changes nothing outside the main thread, where no signal arrives.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def between_steps() -> Iterator[Callable[[], None]]:
    """Holds a Ctrl-C back until the function that it gives is called, or until its end; a second one is not held.

    A program that has its own way with the signal keeps it.
    """
    pending: list[int] = []

    def hold(number: int, frame: Any) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)

    def release() -> None:
        if pending:
            pending.clear()
            raise KeyboardInterrupt

    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, hold)
    try:
        yield release
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    release()
