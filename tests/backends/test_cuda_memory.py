"""Memory of a CUDA device: the arithmetic of what KV blocks get, and blocks that move, here on a host device too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from framework.errors import ConfigError
from framework.interfaces import KVSpec
from framework_backends.cuda_memory import CudaMemory, kv_bytes

GB = 10**9
SPECS = [KVSpec((2, 3, -1, 4, 5), torch.float32, 480), KVSpec((-1, 4, 7), torch.float16, 56)]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


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


def numbered(memory: CudaMemory) -> list[torch.Tensor]:
    """Nine blocks with a value of its own in every place that the dtype can tell."""
    kv = memory.allocate_kv(SPECS, 9)
    assert not any(tensor.any() for tensor in kv)
    for tensor in kv:
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 2048)
    return kv


@DEVICES
def test_blocks_are_copied_as_if_at_once(device: str) -> None:
    memory = CudaMemory(torch.device(device))
    kv = numbered(memory)
    before = [tensor.clone() for tensor in kv]
    memory.copy_blocks(kv, SPECS, [(1, 2), (2, 3), (8, 1)])
    for tensor, old, spec in zip(kv, before, SPECS, strict=True):
        dim = spec.shape.index(-1)
        order = torch.tensor([0, 8, 1, 2, 4, 5, 6, 7, 8], device=device)
        assert torch.equal(tensor, old.index_select(dim, order))


@DEVICES
def test_blocks_come_to_the_host_and_go_back_elsewhere(device: str) -> None:
    memory = CudaMemory(torch.device(device))
    kv = numbered(memory)
    before = [tensor.clone().cpu() for tensor in kv]
    data = memory.gather_blocks(kv, SPECS, [5, 2])
    assert [(d.device.type, d.shape, d.dtype) for d in data] == [
        ("cpu", (2, 2, 3, 4, 5), torch.float32),
        ("cpu", (2, 4, 7), torch.float16),
    ]
    memory.scatter_blocks(kv, SPECS, [0, 7], data)
    for one in data:
        one.zero_()  # which changes nothing any more
    for tensor, old, spec in zip(kv, before, SPECS, strict=True):
        order = torch.tensor([5, 1, 2, 3, 4, 5, 6, 2, 8])
        assert torch.equal(tensor.cpu(), old.index_select(spec.shape.index(-1), order))


@pytest.mark.cuda
def test_blocks_are_copied_and_put_back_without_waiting() -> None:
    memory = CudaMemory(torch.device("cuda"))
    kv = numbered(memory)
    data = memory.gather_blocks(kv, SPECS, [5, 2])
    torch.cuda.set_sync_debug_mode("error")
    try:
        memory.copy_blocks(kv, SPECS, [(1, 2), (2, 3)])
        memory.scatter_blocks(kv, SPECS, [0, 7], data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_what_the_largest_step_takes_at_a_time_is_not_given_away() -> None:
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
