"""Digests tell rows apart by every bit and place, and by nothing else."""

import torch

from framework.sampling.watched import digest


def test_equal_rows_have_equal_digests_wherever_they_stand():
    rows = torch.randn(3, 200)
    again = torch.cat([rows[2:], rows[:2]])
    assert digest(again).tolist() == [digest(rows).tolist()[i] for i in (2, 0, 1)]


def test_smallest_change_of_one_value_and_an_exchange_of_two_are_told():
    row = torch.randn(1, 200)
    nudged, swapped = row.clone(), row.clone()
    nudged[0, 77] = torch.nextafter(row[0, 77], torch.tensor(9.0))
    swapped[0, [5, 9]] = row[0, [9, 5]]
    assert len({int(digest(one)) for one in (row, nudged, swapped)}) == 3


def test_zeros_of_both_signs_are_one_and_infinities_are_two():
    assert digest(torch.tensor([[0.0, 1.0]])) == digest(torch.tensor([[-0.0, 1.0]]))
    assert digest(torch.tensor([[torch.inf]])) != digest(torch.tensor([[-torch.inf]]))
