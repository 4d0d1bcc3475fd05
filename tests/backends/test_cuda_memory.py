"""Memory of a CUDA device: the arithmetic of what KV blocks get, and what is measured for it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from framework.errors import ConfigError
from framework.interfaces import KVSpec
from framework_backends.cuda_memory import CudaMemory, kv_bytes

GB = 10**9


def test_kv_has_the_fraction_of_the_device_less_what_is_in_use_and_a_step() -> None:
    assert kv_bytes(8192, 1000, 0.5, in_use=20 * GB, total=100 * GB, step_bytes=5 * GB) == 25 * GB


def test_nine_tenths_are_given_away_when_nobody_says_how_much() -> None:
    assert kv_bytes(8192, 1000, None, in_use=0, total=100 * GB, step_bytes=0) == 90 * GB


@pytest.mark.parametrize("fraction", (0.0, -0.1, 1.5, float("nan")))
def test_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.memory_fraction=.* must be above 0 and at most 1"):
        kv_bytes(8192, 1000, fraction, in_use=0, total=1, step_bytes=0)


def test_one_request_that_does_not_fit_is_refused_with_what_is_left() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_bytes(131072, 131072, None, in_use=75 * GB, total=100 * GB, step_bytes=5 * GB)
    assert str(caught.value) == (
        "engine.max_model_len=131072 takes 17.2 GB of KV cache for one request, and 10.0 GB are left: "
        "kv_cache.memory_fraction=0.9 of 100.0 GB, less 75.0 GB in use and 5.0 GB for a step. Lower "
        "engine.max_model_len, raise kv_cache.memory_fraction, or free memory of the device"
    )


def test_a_device_that_is_full_has_nothing_left() -> None:
    with pytest.raises(ConfigError, match=r"and 0\.0 GB are left"):
        kv_bytes(10, 1, None, in_use=99 * GB, total=100 * GB, step_bytes=0)


class Closed:
    """What only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


class Allocator:
    """Bytes of a device as torch counts them."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def take(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.allocated


def test_memory_of_a_closed_engine_does_not_hide_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a circle that the collector may find while the step runs, before its peak."""
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset_peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocator.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.peak)
    closed = Closed()
    allocator.take(60)
    weakref.finalize(closed, allocator.take, -60)
    del closed

    def forward() -> None:
        gc.collect()
        allocator.take(10)

    memory = CudaMemory(torch.device("cpu"))
    memory.profile(forward)
    assert memory._step_bytes == 10


@pytest.mark.cuda
def test_what_the_largest_step_takes_at_a_time_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    total = torch.cuda.get_device_properties(0).total_memory

    def of_this_process(device: torch.device) -> tuple[int, int]:
        return total - torch.cuda.memory_reserved(device), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", of_this_process)  # the device's own counts what others take
    memory, size = CudaMemory(torch.device("cuda")), 64 << 20
    kept = torch.zeros(size, dtype=torch.uint8, device="cuda")
    before = memory.kv_bytes(1, 1, 0.5)

    def step() -> None:
        for _ in range(2):
            torch.zeros(size, dtype=torch.uint8, device="cuda")

    memory.profile(step)
    assert size <= before - memory.kv_bytes(1, 1, 0.5) < 2 * size
    assert not kept.any()


@pytest.mark.cuda
def test_a_step_that_does_not_fit_is_refused_with_the_keys_that_make_it_smaller() -> None:
    memory = CudaMemory(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"the largest step does not fit .*Lower scheduler\.max_num_batched_tokens"):
        memory.profile(lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"))


@pytest.mark.cuda
def test_more_than_the_device_has_is_refused_by_the_allocator() -> None:
    memory = CudaMemory(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.allocate_kv([KVSpec((-1, 1 << 20), torch.float32, 4 << 20)], 1 << 20)
