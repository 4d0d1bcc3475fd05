"""Where threads allocate: in the one arena of the C library in which a step's memory is kept from step to step."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_M_ARENA_MAX = -8  # of mallopt(3)


@cache
def share_main_arena() -> bool:
    """Asks that threads that begin from now on get no arena of their own: they allocate where the main thread does,
    unless other threads have allocated before and left arenas, of which glibc gives them one. False where the C library
    is not glibc, or the environment says how many arenas there are (MALLOC_ARENA_MAX, or GLIBC_TUNABLES with
    glibc.malloc.arena_max).

    An arena of a thread is made of pieces of 64 MB that come from the system and go back to it: what a step frees is
    not there for the next one, whatever a backend does to keep it, and no large page is. A workload of 32 requests ran
    at 271 tokens a second in a thread with its own arena and at 288 in one with the main one, beside 290 in the main
    thread itself (the default model, two x86 cores). Concerns the whole process.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: a system whose libraries are not found by None
        return False
    return bool(mallopt(ctypes.c_int(_M_ARENA_MAX), ctypes.c_int(1)) == 1)
