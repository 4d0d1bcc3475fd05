"""Python's garbage collector while steps are made: it passes over what was there before, and looks at what is new.

A full collection looks at every object of the process, which takes a tenth of a second with torch in it, and no step is
made meanwhile. For callers that make steps until something is done: what they hold is no garbage before that.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_resting = 0
_is_ours = False  # whether what is frozen was frozen here


@contextmanager
def resting_collector() -> Iterator[None]:
    """Leaves out the objects that there are now until its end, and that of others inside of it. Costs the same for any
    number of them. A program that has frozen objects by itself is left as it is."""
    global _num_resting, _is_ours
    with _lock:
        if not _num_resting and gc.isenabled() and not gc.get_freeze_count():
            gc.freeze()
            _is_ours = True
        _num_resting += 1
    try:
        yield
    finally:
        with _lock:
            _num_resting -= 1
            if not _num_resting and _is_ours:
                gc.unfreeze()
                _is_ours = False
