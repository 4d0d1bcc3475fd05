"""Whole KV blocks of any layout, copied, brought to the host and put back: on a host and on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from framework.interfaces import KVSpec
from framework_backends.cuda_memory import CudaMemory
from framework_backends.moved_blocks import MovesBlocks

SPECS = [KVSpec((2, 3, -1, 4, 5), torch.float32, 480), KVSpec((-1, 4, 7), torch.float16, 56)]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def mover(device: str) -> MovesBlocks:
    made = MovesBlocks()
    made.device = torch.device(device)
    return made


def numbered(device: str) -> list[torch.Tensor]:
    """Nine blocks with a value of its own in every place that the dtype can tell."""
    kv = CudaMemory(torch.device(device)).allocate_kv(SPECS, 9)
    assert not any(tensor.any() for tensor in kv)
    for tensor in kv:
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 2048)
    return kv


@DEVICES
def test_blocks_are_copied_as_if_at_once(device: str) -> None:
    moves, kv = mover(device), numbered(device)
    before = [tensor.clone() for tensor in kv]
    moves.copy_blocks(kv, SPECS, [(1, 2), (2, 3), (8, 1)])
    for tensor, old, spec in zip(kv, before, SPECS, strict=True):
        dim = spec.shape.index(-1)
        order = torch.tensor([0, 8, 1, 2, 4, 5, 6, 7, 8], device=device)
        assert torch.equal(tensor, old.index_select(dim, order))


@DEVICES
def test_blocks_come_to_the_host_and_go_back_elsewhere(device: str) -> None:
    moves, kv = mover(device), numbered(device)
    before = [tensor.clone().cpu() for tensor in kv]
    data = moves.gather_blocks(kv, SPECS, [5, 2])
    assert [(d.device.type, d.shape, d.dtype) for d in data] == [
        ("cpu", (2, 2, 3, 4, 5), torch.float32),
        ("cpu", (2, 4, 7), torch.float16),
    ]
    if device == "cuda":
        torch.cuda._sleep(100_000_000)  # so that the device is behind with what follows
    moves.scatter_blocks(kv, SPECS, [0, 7], data)
    for one in data:
        one.zero_()  # which changes nothing any more
    for tensor, old, spec in zip(kv, before, SPECS, strict=True):
        order = torch.tensor([5, 1, 2, 3, 4, 5, 6, 2, 8])
        assert torch.equal(tensor.cpu(), old.index_select(spec.shape.index(-1), order))


@pytest.mark.cuda
def test_blocks_are_copied_and_put_back_without_waiting() -> None:
    moves, kv = mover("cuda"), numbered("cuda")
    data = moves.gather_blocks(kv, SPECS, [5, 2])
    torch.cuda.set_sync_debug_mode("error")
    try:
        moves.copy_blocks(kv, SPECS, [(1, 2), (2, 3)])
        moves.scatter_blocks(kv, SPECS, [0, 7], data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
