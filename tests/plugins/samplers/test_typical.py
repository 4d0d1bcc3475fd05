"""typical keeps the tokens whose surprise is nearest to the entropy, on both sides of it."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TypicalLogitsWarper

from framework import SamplingParams
from framework.testing.stages import CHECKS, StageCase
from framework_samplers.typical import FIRST_CANDIDATES, Typical


def params(*values):
    return [SamplingParams(extra_args={"typical": {"mass": value}}) for value in values]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    check(StageCase(Typical, tuple(params(0.05, 0.5, 1e-9, 0.9999999)), (*params(1.0), SamplingParams(temperature=0))))


@pytest.mark.parametrize(("vocab", "scale"), [(40, 1.0), (3001, 0.1), (3001, 1.0), (20_000, 3.0)])
@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9, 0.99])
def test_agrees_with_transformers(run_stage, random_logits, vocab, scale, mass):
    logits = random_logits(3, vocab, scale=scale)
    ours = run_stage(Typical, params(mass) * 3, logits)
    theirs = TypicalLogitsWarper(mass)(None, logits)
    # Distances and sums round differently: tokens whose distance is that of the bound may differ, and next to nothing.
    assert int((ours.isfinite() != theirs.isfinite()).sum(-1).max()) <= 2


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=300), st.floats(1e-6, 0.9999))
def test_a_token_stays_iff_the_mass_of_nearer_ones_is_below_the_target(run_stage, values, mass):
    logits = torch.tensor([values], dtype=torch.float32)
    kept = run_stage(Typical, params(mass), logits)[0].isfinite().tolist()
    log_p = logits.double().log_softmax(-1)[0]
    p = log_p.exp()
    distance = (-log_p + (p * log_p).sum()).abs()
    for place, is_kept in enumerate(kept):
        nearer = float(p[distance < distance[place] - 1e-6].sum())
        as_near = float(p[distance < distance[place] + 1e-6].sum())
        assert is_kept == (nearer < mass) or abs(nearer - mass) < 1e-6 or nearer < mass < as_near
    assert any(kept)


def test_cuts_the_best_token_where_it_is_far_more_likely_than_a_typical_one(run_stage):
    logits = torch.cat([torch.tensor([3.0]), torch.zeros(200)]).unsqueeze(0)
    kept = run_stage(Typical, params(0.5), logits)[0].isfinite()
    assert kept.tolist() == [False] + [True] * 200


def test_equal_distances_on_both_sides_stay_together(run_stage):
    """With p = 1/8, 1/4, 1/8 twice over the entropy is ln 6: no bound may part tokens of one distance."""
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, -30.0]])
    for mass in (0.1, 0.4, 0.6):
        kept = run_stage(Typical, params(mass), logits)[0].isfinite().tolist()
        assert kept[0] == kept[2] and kept[1] == kept[3] and any(kept)


def test_every_tier_finds_the_same_bounds(run_stage, random_logits, monkeypatch):
    logits = torch.cat([random_logits(2, 5000, scale=s) for s in (0.01, 0.5, 2.0, 8.0)])
    in_tiers = run_stage(Typical, params(0.9) * 8, logits)
    counts = in_tiers.isfinite().sum(-1).tolist()
    assert counts[0] > FIRST_CANDIDATES[1] and FIRST_CANDIDATES[0] > counts[-1]
    monkeypatch.setattr("framework_samplers.typical.FIRST_CANDIDATES", ())
    assert torch.equal(run_stage(Typical, params(0.9) * 8, logits), in_tiers)


def test_rows_with_different_masses_in_one_batch(run_stage, random_logits):
    logits, values = random_logits(4, 2000), (0.3, 1.0, 0.95, 0.01)
    together = run_stage(Typical, params(*values), logits)
    assert torch.equal(together[1], logits[1])
    for row, mass in enumerate(values):
        assert torch.equal(run_stage(Typical, params(mass), logits[row : row + 1])[0], together[row])


def test_measures_inside_the_interval_only(run_stage):
    logits = torch.tensor([[9.0, 1.0, 1.0, 0.9, -5.0]])
    interval = (torch.tensor([0.0]), torch.tensor([1.0]))
    ours = run_stage(Typical, params(0.999), logits, interval)
    assert ours.isfinite().tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize("value", [0, 1.5, float("nan"), "0.5"])
def test_a_mass_outside_of_its_range_is_refused(run_stage, value):
    with pytest.raises(ValueError, match=r"extra_args\.typical\.mass must be (in \(0, 1\]|a number), got"):
        run_stage(Typical, params(value), torch.zeros(1, 4))
