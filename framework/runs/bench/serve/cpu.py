"""CPU seconds of a process and its children, from /proc. None where a system has no /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds(pid: int) -> float | None:
    """User and system time of the process, its threads, and its children, those that have ended included."""
    found = [_seconds(one) for one in _family(pid)]
    known = [seconds for seconds in found if seconds is not None]
    return sum(known) if known else None


def own_cpu_seconds() -> float:
    """Of this process, all threads."""
    return time.process_time()


def _family(pid: int) -> list[int]:
    pids = [pid]
    for one in pids:  # grows while it is read
        for listed in PROC.glob(f"{one}/task/*/children"):
            try:
                pids += [int(child) for child in listed.read_text().split()]
            except OSError:  # the thread has ended meanwhile
                continue
    return pids


def _seconds(pid: int) -> float | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold spaces: what is counted stands behind the last bracket (proc(5)).
    fields = text.rpartition(")")[2].split()
    user, system, user_of_children, system_of_children = map(int, fields[11:15])
    return (user + system + user_of_children + system_of_children) / os.sysconf("SC_CLK_TCK")
