"""How a program of our own ends by a signal: at once, with the signal's exit code, wherever it is.

`python -m framework` and the script install it before anything else is imported. A run that has something to keep holds
the signals meanwhile (`runs/signals.py`); a program that only uses the library never gets here.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def install() -> None:
    """A signal from here on ends the process at once; one that the starter of the program ignores stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)


def end_at_once(number: int, frame: Any) -> NoReturn:
    """The handler. Flushes nothing: whoever reads our output may have stopped.

    An exception instead could be lost on its way through an import or a callback from C.
    """
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def interrupt(number: int, frame: Any) -> NoReturn:
    """The handler that raises, for whoever has something to end in order."""
    raise KeyboardInterrupt(number)


def is_of_signal(code: object) -> bool:
    """Whether an exit code says that a signal ended the program."""
    return code in [128 + number for number in SIGNALS]


def leave(code: int) -> NoReturn:
    """Ends the process with all that was printed, and without what others left for the interpreter's end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            continue
    os._exit(code)
