"""Staged writes in Triton leave a table as the torch reference leaves it."""

import torch

from framework import step_ops
from framework_backends.triton.staged import apply_rows, apply_spans


def test_rows_are_overwritten_whole(device):
    table = torch.randint(0, 255, (9, 1100), dtype=torch.uint8, device=device)
    rows, values = torch.tensor([7, 1, 4], device=device), torch.randint(0, 255, (3, 1100), dtype=torch.uint8)
    expected = table.clone()
    step_ops.apply_rows(expected, rows, values.to(device))
    apply_rows(table, rows, values.to(device))
    assert torch.equal(table, expected)


def test_ragged_spans_are_written_and_nothing_else(device):
    flat = torch.zeros(5000, dtype=torch.int32, device=device)
    starts, counts = [3, 4000, 100, 2000], [1, 0, 1500, 700]
    values = torch.arange(1, sum(counts) + 1, dtype=torch.int32, device=device)
    expected = flat.clone()
    step_ops.apply_spans(expected, starts, counts, values)
    apply_spans(flat, starts, counts, values)
    assert torch.equal(flat, expected)


def test_nothing_staged_writes_nothing(device):
    flat = torch.zeros(10, dtype=torch.int32, device=device)
    apply_spans(flat, [], [], torch.zeros(0, dtype=torch.int32, device=device))
    assert not flat.any()
