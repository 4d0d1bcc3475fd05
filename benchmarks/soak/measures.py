"""Memory, threads and objects of this process, and how fast a figure grows."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Measure:
    """At one quiet moment. minutes since the start; requests served so far; resident MB (10^6 bytes); MB that tensors
    have on a device, 0 without one."""

    minutes: float
    num_requests: int
    resident_mb: float
    num_threads: int
    num_objects: int
    device_mb: float


def measure(minutes: float, num_requests: int) -> Measure:
    """Garbage is collected first, and the C library gives back its free pages: each thread that an engine starts may
    use another of its arenas, and what lies free in them comes and goes by megabytes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    status = Path("/proc/self/status").read_text().split("Threads:")[1]
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    device = torch.cuda.memory_allocated() / 1e6 if torch.cuda.is_initialized() else 0.0
    return Measure(minutes, num_requests, resident, int(status.split()[0]), len(gc.get_objects()), device)


def growth(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least squares line."""
    return statistics.linear_regression(x, y).slope
