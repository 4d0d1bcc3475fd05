"""Memory of the host: how much there is, tensors that cost nothing until written, and an allocator that keeps pages."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from framework.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 1 << 30
_HUGE_PAGE = 2 << 20


def keep_freed_memory() -> bool:
    """Lets the C library keep freed memory instead of giving it back to the system; False where it is not glibc.

    A step allocates and frees the same megabytes again and again. By default glibc maps each large piece anew and the
    system zeroes every page of it: a workload of 32 requests took 11.6 s that way and 9.8 s with kept pages
    (`python benchmarks/cpu.py --part throughput -n 32`, two x86 cores). Concerns the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    thresholds = (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(_KEPT_BYTES)) == 1 for name in thresholds)


@cache
def prefer_huge_pages(num_bytes: int = _KEPT_BYTES - (64 << 20)) -> bool:
    """Asks for huge pages where the next `num_bytes` of tensors will lie; False where they are not to be had.

    Reading weights is what a step of few rows spends its time on, and with small pages finding them takes a good part
    of it: a decode of one request took 20.0 ms and 17.9 ms with huge pages (`--part batch1`, a virtual machine of two
    x86 cores). The memory is allocated, marked and freed again, without touching it; an allocator that keeps freed
    memory hands it out afterwards. Costs neither time nor memory until then. Done once a process: a second engine
    takes what the first one gave back.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        room = torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:  # a system that promises no more than it has
        return False
    start = -(-room.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = room.data_ptr() + num_bytes - start
    madvise = ctypes.CDLL(None).madvise
    return madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE)) == 0


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages become resident when they are first written: the system hands out zeroed pages on demand.

    Small pages are asked for: a block of one head is a few kilobytes, and with pages of 2 MB the first blocks of every
    head and layer of a small model kept 250 MB more in memory, for no gain in speed.
    """
    size = math.prod(shape)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size * dtype.itemsize, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages refuses the advice
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(tuple(shape))


def kv_bytes(max_model_len: int, bytes_per_token: int, fraction: float | None, free: int) -> int:
    """`fraction` of the free bytes; without one the smaller of 4 x max_model_len tokens and a tenth of them.

    Raises ConfigError for a fraction outside (0, 1].
    """
    if fraction is None:
        return min(4 * max_model_len * bytes_per_token, free // 10)
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"kv_cache.memory_fraction={fraction} must be above 0 and at most 1. Leave it null for a tenth."
        )
    return int(free * fraction)


def free_bytes() -> int:
    """Bytes that can be used without swapping: of the machine, or of the container when it allows less."""
    machine = _available(_read("/proc/meminfo"))
    if machine is None:
        machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = {name: _read(str(_CGROUP / name)) for name in ("memory.max", "memory.current", "memory.stat")}
    container = _container_free(files)
    return machine if container is None else max(0, min(machine, container))


def _available(meminfo: str) -> int | None:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _container_free(files: Mapping[str, str]) -> int | None:
    """Limit minus use of a version 2 control group, None without a limit. Clean file pages count as free."""
    limit, current = files["memory.max"].strip(), files["memory.current"].strip()
    if not limit.isdigit() or not current.isdigit():
        return None
    lines = [line.split() for line in files["memory.stat"].splitlines()]
    reclaimable = sum(int(words[1]) for words in lines if len(words) == 2 and words[0] == "inactive_file")
    return int(limit) - int(current) + reclaimable


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
