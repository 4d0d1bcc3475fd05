"""KV memory on the host: how much is given, and that untouched blocks cost nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from framework.errors import ConfigError
from framework_backends import cpu_memory
from framework_backends.cpu_memory import free_bytes, kv_bytes, lazy_zeros


def test_kv_is_four_full_contexts_when_memory_is_plenty() -> None:
    assert kv_bytes(8192, 23040, None, free=1 << 40) == 4 * 8192 * 23040


def test_kv_is_a_tenth_of_free_memory_when_that_is_less() -> None:
    assert kv_bytes(8192, 23040, None, free=1_000_000) == 100_000


def test_kv_is_the_fraction_of_free_memory_that_was_asked_for() -> None:
    assert kv_bytes(8192, 23040, 0.25, free=1_000_000) == 250_000


@pytest.mark.parametrize("fraction", (0.0, -0.1, 1.5, float("nan")))
def test_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.memory_fraction=.* must be above 0 and at most 1"):
        kv_bytes(8192, 23040, fraction, free=1)


def test_container_limit_bounds_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n",
        "/sys/fs/cgroup/memory.max": "3000000\n",
        "/sys/fs/cgroup/memory.current": "2500000\n",
        "/sys/fs/cgroup/memory.stat": "anon 7\ninactive_file 100000\n",
    }
    monkeypatch.setattr(cpu_memory, "_read", lambda path: files.get(path, ""))
    assert free_bytes() == 3000000 - 2500000 + 100000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert free_bytes() == 5000 * 1024


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_blocks_that_were_never_written_cost_no_resident_memory() -> None:
    before = resident_bytes()
    kv = lazy_zeros((2, 3, 20000, 16, 64), torch.bfloat16)
    kv[:, :, 5] = 1
    assert kv.numel() * 2 > 200 << 20
    assert resident_bytes() - before < 20 << 20


def test_keeping_freed_memory_is_asked_of_glibc_and_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda name, value: asked.append((name.value, value.value)) or 1)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    assert cpu_memory.keep_freed_memory()
    assert asked == [(-3, 1 << 30), (-1, 1 << 30)]
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace())
    assert not cpu_memory.keep_freed_memory()


def test_huge_pages_are_asked_for_whole_ones_and_no_further_than_the_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int, int]] = []
    library = SimpleNamespace(madvise=lambda a, n, advice: asked.append((a.value, n.value, advice.value)) or 0)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 14, raising=False)
    room = torch.empty(9 << 20, dtype=torch.uint8)
    monkeypatch.setattr("torch.empty", lambda *_, **__: room)
    assert cpu_memory.prefer_huge_pages.__wrapped__(9 << 20)
    (start, length, advice), end = asked[0], room.data_ptr() + (9 << 20)
    assert advice == 14 and start % (2 << 20) == 0
    assert room.data_ptr() <= start < room.data_ptr() + (2 << 20) and start + length == end


def test_no_huge_pages_where_memory_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("torch.empty", refuse)
    assert not cpu_memory.prefer_huge_pages.__wrapped__()
