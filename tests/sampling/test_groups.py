"""Reductions by groups of 128 equal the plain ones, ties and short groups included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.sampling.groups import best, largest, largest_ids, log_mass

INF = float("inf")


def tied_logits(rows, vocab, seed):
    """Few different values, so that every bound has ties, and some masked tokens."""
    values = torch.randint(-3, 4, (rows, vocab), generator=torch.Generator().manual_seed(seed)).float()
    values[values == -3] = -INF
    return values


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 700), st.integers(0, 10_000), st.sampled_from([4, 8]))
def test_best_is_the_first_of_the_largest(vocab, seed, rows):
    """Of few rows and of many; padding of the last group is no token, though it is no less than the others."""
    logits = tied_logits(4, vocab, seed) - 9
    top, ids = best(logits.repeat(rows // 4, 1))
    top, ids = top[:4], ids[:4]
    assert torch.equal(top, logits.amax(-1))
    assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_best_of_equal_zeros_is_the_first():
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])
    assert best(logits)[1].tolist() == [1, 1]


def test_best_of_a_row_that_is_no_number_stays_in_range():
    logits = torch.zeros(3, 130)
    logits[0] = float("nan")
    logits[1, 129] = float("nan")
    logits[2] = -INF
    top, ids = best(logits)
    assert top.isnan().tolist() == [True, True, False]
    assert all(0 <= i < 130 for i in ids.tolist())


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.data())
def test_largest_equals_a_whole_sort(vocab, data):
    k = data.draw(st.integers(1, vocab))
    logits = tied_logits(3, vocab, vocab) + torch.linspace(0, 1, vocab) * data.draw(st.sampled_from([0.0, 1.0]))
    assert torch.equal(largest(logits, k), logits.sort(-1, descending=True).values[:, :k])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.data())
def test_largest_ids_put_the_lowest_id_first_among_equals(vocab, data):
    k = data.draw(st.integers(0, min(vocab, 40)))
    logits = tied_logits(3, vocab, vocab)
    expected = [sorted(range(vocab), key=lambda i, row=row: (-row[i], i))[:k] for row in logits.tolist()]
    assert largest_ids(logits, k).tolist() == expected


def test_zeros_of_both_signs_are_equals():
    logits = torch.full((1, 600), -1.0).index_copy(1, torch.tensor([3, 200, 599]), torch.tensor([[-0.0, 0.0, 0.0]]))
    assert largest_ids(logits, 2).tolist() == [[3, 200]]


@pytest.mark.parametrize("vocab", [1, 127, 128, 1000])
def test_log_mass_equals_torch(vocab):
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0)) * 5
    top = logits.amax(-1, keepdim=True)
    expected = (logits.double() - top).logsumexp(-1, keepdim=True)
    torch.testing.assert_close(log_mass(logits, top), expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("k", [1, 97])
def test_largest_ids_of_a_row_that_is_no_number_stay_in_range(k, sign):
    nan = torch.tensor([float("nan")]).copysign(torch.tensor(sign))
    ids = largest_ids(torch.stack([nan.expand(97), torch.zeros(97)]), k)
    assert ids.max() < 97
    assert ids[1].tolist() == list(range(k))
