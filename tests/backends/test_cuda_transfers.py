"""Results on their way to the host: few copies, the same tree. On a host device the copies are ordinary ones."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from framework_backends.cuda_graphs import Graphs
from framework_backends.cuda_transfers import HostCopies, Transfers

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "left right")


@dataclass(slots=True)
class Slotted:
    ids: torch.Tensor
    rows: np.ndarray
    parts: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    logprobs: torch.Tensor
    k: int = 3


def random_tree() -> tuple[Slotted, torch.Tensor]:
    """Two dtypes in one storage of bytes, and tensors elsewhere. No byte is as large as those of a float that is not a
    number, which would not equal itself."""
    storage = torch.randint(0, 120, (400,), dtype=torch.uint8)
    ids, strided = storage[8:88].view(torch.int64), storage[100:260].view(torch.float32).view(5, 8)[:, 1:7:2]
    parts = [Frozen(strided), {"a": torch.randn(3), "b": None}, Pair(torch.tensor(4), "text"), (ids, 7)]
    return Slotted(ids, np.arange(3), parts), storage


def brought(value: Any) -> Any:
    copies = HostCopies(value, CPU)
    return copies.value(copies.start())


def test_the_host_has_the_same_tree_with_the_same_numbers() -> None:
    tree, storage = random_tree()
    found = brought(tree)
    wanted, _ = torch.clone(storage), storage.zero_()
    assert type(found) is Slotted and found.rows is tree.rows
    assert torch.equal(found.ids, wanted[8:88].view(torch.int64))
    frozen, named, pair, both = found.parts
    assert type(frozen) is Frozen and frozen.k == 3
    assert torch.equal(frozen.logprobs, wanted[100:260].view(torch.float32).view(5, 8)[:, 1:7:2])
    assert torch.equal(named["a"], tree.parts[1]["a"]) and named["b"] is None
    assert type(pair) is Pair and pair.left == 4 and pair.right == "text"
    assert type(both) is tuple and both[0] is found.ids and both[1] == 7


def test_what_was_handed_out_is_never_written_again() -> None:
    source = torch.arange(6)
    copies = HostCopies((source[:2], source[4:]), CPU)
    first = copies.value(copies.start())
    source.zero_()
    second = copies.value(copies.start())
    assert [t.tolist() for t in first] == [[0, 1], [4, 5]] and [t.tolist() for t in second] == [[0, 0], [0, 0]]


def test_a_value_may_lie_behind_others_in_its_memory() -> None:
    tree, storage = random_tree()
    copies = HostCopies(tree, CPU)
    ring = torch.zeros(3, copies.num_bytes, dtype=torch.uint8)
    ring[2] = copies.start()
    found = copies.value(ring[2])
    assert torch.equal(found.ids, storage[8:88].view(torch.int64))
    assert torch.equal(found.parts[1]["a"], tree.parts[1]["a"]) and found.parts[2].left == 4


def test_a_value_without_tensors_is_handed_out_as_it_is() -> None:
    value = {"none": None, "rows": np.arange(3), "tensors": []}
    assert brought(value) is value


def test_tensors_of_another_device_stay_as_they_are() -> None:
    here, elsewhere = torch.arange(3), torch.empty(2, device=META)
    found = brought([here, elsewhere])
    assert found[1] is elsewhere and found[0] is not here


def test_an_empty_tensor_comes_with_its_shape_and_dtype() -> None:
    empty = torch.zeros(4, 0, dtype=torch.float16)
    (found,) = brought([empty])
    assert found.shape == (4, 0) and found.dtype == torch.float16


def num_copies(monkeypatch: pytest.MonkeyPatch, value: Any) -> list[int]:
    """Bytes of each copy that brings the value to the host."""
    sizes: list[int] = []
    copies, copy = HostCopies(value, CPU), torch.Tensor.copy_

    def counting(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        sizes.append(source.nbytes)
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    copies.start()
    return sizes


def test_neighbours_in_one_storage_are_one_copy_of_what_covers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.zeros(1000, dtype=torch.uint8)
    value = [storage[32:64], storage[128:192].view(torch.int64), storage[96:128].view(torch.float32)]
    assert num_copies(monkeypatch, value) == [160]


def test_the_ends_of_a_large_storage_are_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.zeros(1 << 20, dtype=torch.uint8)
    assert num_copies(monkeypatch, (storage[:64], storage[-64:])) == [64, 64]


def test_storages_are_copied_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(num_copies(monkeypatch, (torch.zeros(2), torch.zeros(4)))) == [8, 16]


@pytest.mark.cuda
def test_results_arrive_though_the_next_step_overwrites_them() -> None:
    device = torch.device("cuda", 0)
    transfers, out = Transfers(device), torch.zeros(4, 4096, device=device)
    number, slow = torch.zeros((), device=device), torch.randn(2048, 2048, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        arriving = []
        for _ in range(6):
            number += 1
            slow = torch.mm(slow, slow).clamp_(-1, 1)
            out.copy_(number.expand_as(out))
            arriving.append(transfers.copied({"out": out[1:3]}))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [one.wait()["out"] for one in arriving]
    assert [(t.min().item(), t.max().item()) for t in found] == [(i, i) for i in range(1, 7)]
    assert all(t.device.type == "cpu" and t.shape == (2, 4096) for t in found)
    assert all(one.done() for one in arriving)


@pytest.mark.cuda
@pytest.mark.parametrize("num_values", (300, 300_000))
def test_results_of_a_captured_step_arrive_two_steps_behind(num_values: int) -> None:
    device = torch.device("cuda", 0)
    transfers, number = Transfers(device), torch.zeros((), device=device)

    def step() -> Frozen:
        number.add_(1)
        return Frozen(number.expand(num_values).clone())

    captured = Graphs(device, transfers).capture(step, "a step")
    assert (transfers.outbox(step()) is None) == (num_values > 300)
    number.zero_()
    arriving, found = [], []
    for count in range(10):
        captured()
        arriving.append(captured.arriving())
        if count:
            found.append(arriving.pop(0).wait().logprobs.clone())
    found.append(arriving.pop(0).wait().logprobs)
    assert [t.unique().tolist() for t in found] == [[count] for count in range(1, 11)]
    assert {len(t) for t in found} == {num_values}


@pytest.mark.cuda
def test_the_stream_that_is_current_is_the_one_that_is_waited_for() -> None:
    device = torch.device("cuda", 0)
    transfers, slow = Transfers(device), torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    arriving = []
    for number, stream in enumerate((torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            value = torch.full((100_000,), number, device=device) + torch.mm(slow, slow)[0, 0] * 0
            arriving.append(transfers.copied([value]))
            del value
    assert [one.wait()[0].unique().tolist() for one in arriving] == [[number] for number in range(3)]
