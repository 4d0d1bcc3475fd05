"""A captured step's inbox: each launch takes the next piece of the host's memory, as the torch reference does."""

import pytest
import torch

from framework import step_ops
from framework_backends.triton.inbox import receive


def ring_of(pieces, lines, rows, device):
    ring = torch.randint(0, 1 << 40, (pieces, lines, rows))
    return ring.pin_memory() if device.type == "cuda" else ring


@pytest.mark.parametrize(("lines", "rows", "num_rows"), [(2, 7, 1), (3, 600, 600), (2, 300, 257)])
def test_each_launch_takes_the_next_piece(device, lines, rows, num_rows):
    ring = ring_of(3, lines, rows, device)
    ours, theirs = torch.zeros(lines, rows, dtype=torch.int64, device=device), torch.zeros(lines, rows).long()
    turns = torch.full((1,), 1, device=device), torch.tensor([1])
    for _ in range(4):
        receive(ours, ring, turns[0], num_rows)
        step_ops.receive(theirs, ring, turns[1], num_rows)
        assert torch.equal(ours.cpu(), theirs) and turns[0].tolist() == turns[1].tolist()
    assert theirs[:, :num_rows].all() and not theirs[:, num_rows:].any()


def test_words_that_the_host_has_changed_are_taken_as_they_are_now(device):
    ring = ring_of(2, 2, 20, device)
    told, turn = torch.zeros(2, 20, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for number in range(6):
        ring[number % 2] = number
        receive(told, ring, turn, 20)
        assert told.unique().tolist() == [number]
