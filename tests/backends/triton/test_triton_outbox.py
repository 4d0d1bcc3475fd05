"""A captured step's outbox: each launch fills the next slot with all that the step gives, and nothing behind it."""

from dataclasses import dataclass

import torch

from framework_backends.cuda_transfers import Outbox


@dataclass(frozen=True, slots=True)
class Result:
    ids: torch.Tensor
    told: torch.Tensor
    logprobs: torch.Tensor
    none: None = None


def result(device, seed):
    """Two storages, one of them with two tensors and more than a program writes at a time."""
    torch.manual_seed(seed)
    piece = torch.randint(0, 255, (6016,), dtype=torch.uint8).to(device)
    return Result(piece[16:96].view(torch.int64), piece[96:5996].view(torch.float32), torch.randn(5, 3).to(device))


def test_each_launch_fills_the_next_slot(device):
    outbox = Outbox(result(device, 0), device)
    values = [result(device, seed) for seed in range(1, 7)]
    slots = []
    for value in values:
        outbox.write(value)
        slots.append(outbox.next())
    if device.type == "cuda":
        torch.cuda.synchronize()
    places = [slot.memory.data_ptr() for slot in slots]
    assert places[4:] == places[:2] and len(set(places)) == 4
    for slot, value in zip(slots[2:], values[2:], strict=True):
        found = slot.value
        assert type(found) is Result and found.none is None
        for name in ("ids", "told", "logprobs"):
            ours, theirs = getattr(found, name), getattr(value, name).cpu()
            assert ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


def test_turns_do_not_count_up(device):
    """A count of int32 would overflow in weeks, and the slot of a negative number lies in front of the ring."""
    value = [torch.zeros(32, dtype=torch.uint8, device=device)]
    outbox = Outbox(value, device)
    turns = []
    for _ in range(5):
        turns.append(int(outbox._turn))
        outbox.write(value)
    assert turns == [0, 1, 2, 3, 0]


def test_a_slot_is_written_within_its_bounds(device):
    value = [torch.full((24,), 255, dtype=torch.uint8, device=device)]
    outbox = Outbox(value, device)
    outbox.write(value)
    outbox.next()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert not outbox.next().memory.any()
