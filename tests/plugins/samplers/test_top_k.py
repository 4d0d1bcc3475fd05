"""top_k keeps the k best of the incoming interval and all that equal the last of them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopKLogitsWarper

from framework import SamplingParams
from framework_samplers.top_k import TopK


@pytest.mark.parametrize("vocab", [40, 300, 20_000])
@pytest.mark.parametrize("k", [2, 17, 39])
def test_agrees_with_transformers(run_stage, random_logits, vocab, k):
    logits = random_logits(4, vocab)
    ours = run_stage(TopK, [SamplingParams(top_k=k)] * 4, logits)
    assert torch.equal(ours, TopKLogitsWarper(k)(None, logits))


def test_rows_with_different_k_in_one_batch(run_stage, random_logits):
    logits, ks = random_logits(5, 3000), (2, -1, 900, 30, 5000)
    together = run_stage(TopK, [SamplingParams(top_k=k) for k in ks], logits)
    assert together.isfinite().sum(-1).tolist() == [2, 3000, 900, 30, 3000]
    for row, k in enumerate(ks):
        assert torch.equal(run_stage(TopK, [SamplingParams(top_k=k)], logits[row : row + 1])[0], together[row])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=400), st.data())
def test_ties_at_the_bound_are_kept(run_stage, values, data):
    k = data.draw(st.integers(2, len(values)))
    logits = torch.tensor([values], dtype=torch.float32)
    ours = run_stage(TopK, [SamplingParams(top_k=k)], logits)
    kth = sorted(values, reverse=True)[k - 1]
    assert ours.isfinite()[0].tolist() == [v >= kth for v in values]


@pytest.mark.parametrize("k", [0, -1, 300, 301])
def test_off_is_the_identity(run_stage, random_logits, k):
    logits = random_logits(2, 300)
    assert torch.equal(run_stage(TopK, [SamplingParams(top_k=k)] * 2, logits), logits)


def test_counts_inside_the_interval_only(run_stage):
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    interval = (torch.tensor([1.5]), torch.tensor([4.0]))
    ours = run_stage(TopK, [SamplingParams(top_k=2)], logits, interval)
    assert ours.isfinite().tolist() == [[False, True, True, False, False]]
    more = run_stage(TopK, [SamplingParams(top_k=4)], logits, interval)
    assert more.isfinite().tolist() == [[False, True, True, True, False]]
