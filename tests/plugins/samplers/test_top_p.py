"""top_p keeps the nucleus of the incoming interval, whole ties and at least the best token."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopPLogitsWarper

from framework import SamplingParams
from framework_samplers.top_p import FIRST_CANDIDATES, TopP


def params(*values):
    return [SamplingParams(top_p=p) for p in values]


@pytest.mark.parametrize(("vocab", "scale"), [(40, 1.0), (3000, 0.1), (3000, 1.0), (20_000, 3.0)])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_agrees_with_transformers(run_stage, random_logits, vocab, scale, top_p):
    logits = random_logits(3, vocab, scale=scale)
    ours = run_stage(TopP, params(top_p) * 3, logits)
    theirs = TopPLogitsWarper(top_p)(None, logits)
    # The sums round differently: at most the token at the bound may differ.
    assert int((ours.isfinite() != theirs.isfinite()).sum(-1).max()) <= 1


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=300), st.floats(1e-6, 0.9999))
def test_a_token_stays_iff_the_mass_of_larger_ones_is_below_top_p(run_stage, values, top_p):
    logits = torch.tensor([values], dtype=torch.float32)
    ours = run_stage(TopP, params(top_p), logits)
    probs = logits.double().softmax(-1)[0]
    for value, kept in zip(values, ours[0].isfinite().tolist(), strict=True):
        larger = float(probs[logits[0] > value].sum())
        assert kept == (larger < top_p) or abs(larger - top_p) < 1e-6


def test_a_token_goes_where_the_mass_of_larger_ones_is_top_p_exactly(run_stage):
    half = -0.6931471824645996
    logits = torch.tensor([[0.0, half, half]])
    assert logits.exp().tolist() == [[1.0, 0.5, 0.5]]
    assert run_stage(TopP, params(0.5), logits).isfinite().tolist() == [[True, False, False]]


def test_every_tier_finds_the_same_bound(run_stage, random_logits, monkeypatch):
    """From rows that the first candidates settle to rows that need a whole sort."""
    logits = torch.cat([random_logits(2, 5000, scale=s) for s in (0.01, 0.5, 2.0, 8.0)])
    in_tiers = run_stage(TopP, params(0.9) * 8, logits)
    counts = in_tiers.isfinite().sum(-1).tolist()
    assert counts[0] > FIRST_CANDIDATES[1] and FIRST_CANDIDATES[0] > counts[-1]
    monkeypatch.setattr("framework_samplers.top_p.FIRST_CANDIDATES", ())
    assert torch.equal(run_stage(TopP, params(0.9) * 8, logits), in_tiers)


def test_rows_with_different_top_p_in_one_batch(run_stage, random_logits):
    logits, values = random_logits(4, 2000), (0.3, 1.0, 0.95, 0.01)
    together = run_stage(TopP, params(*values), logits)
    assert torch.equal(together[1], logits[1])
    for row, top_p in enumerate(values):
        assert torch.equal(run_stage(TopP, params(top_p), logits[row : row + 1])[0], together[row])


def test_the_kept_set_grows_with_top_p(run_stage, random_logits):
    logits = random_logits(1, 400, scale=1.5)
    before = torch.zeros(400, dtype=torch.bool)
    for top_p in (1e-6, 0.1, 0.3, 0.31, 0.7, 0.9, 0.999, 0.9999999, 1.0):
        kept = run_stage(TopP, params(top_p), logits)[0].isfinite()
        assert bool((kept | ~before).all()) and bool(kept.any())
        before = kept
    assert bool(before.all())


@pytest.mark.parametrize("top_p", [1e-9, 1e-46, 5e-324])
def test_the_best_token_always_stays_with_its_equals(run_stage, top_p):
    ours = run_stage(TopP, params(top_p), torch.tensor([[1.0, 3.0, 3.0, 2.0]]))
    assert ours.isfinite().tolist() == [[False, True, True, False]]


def test_one_is_the_identity(run_stage, random_logits):
    logits = random_logits(2, 300)
    assert torch.equal(run_stage(TopP, params(1.0, 1.0), logits), logits)


def test_mass_counts_inside_the_interval_only(run_stage):
    logits = torch.tensor([[9.0, 1.0, 1.0 - 1e-3, 0.9, -5.0]])
    interval = (torch.tensor([0.0]), torch.tensor([1.0]))
    ours = run_stage(TopP, params(0.5), logits, interval)
    assert ours.isfinite().tolist() == [[False, True, True, False, False]]
