"""eta and epsilon keep what is more likely than a floor, which sinks for eta where the distribution is wide."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper

from framework import SamplingParams
from framework.testing.stages import CHECKS, StageCase
from framework_samplers.epsilon import Epsilon
from framework_samplers.eta import Eta

STAGES = (Eta, Epsilon)


def params(stage, *values):
    return [SamplingParams(extra_args={stage.spec.name: {"epsilon": value}}) for value in values]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.spec.name)
def test_stage_keeps_its_contract(stage, check):
    check(StageCase(stage, tuple(params(stage, 1e-4, 0.02, 0.9)), (*params(stage, 0), SamplingParams(temperature=0))))


@pytest.mark.parametrize(("vocab", "scale"), [(40, 1.0), (3001, 0.1), (3001, 1.0), (20_000, 3.0)])
@pytest.mark.parametrize("epsilon", [3e-4, 4e-3, 0.2])
@pytest.mark.parametrize(("stage", "warper"), [(Eta, EtaLogitsWarper), (Epsilon, EpsilonLogitsWarper)])
def test_agrees_with_transformers(run_stage, random_logits, stage, warper, vocab, scale, epsilon):
    logits = random_logits(3, vocab, scale=scale)
    ours = run_stage(stage, params(stage, epsilon) * 3, logits)
    theirs = warper(epsilon)(None, logits)
    # Probabilities round differently: at most the token at the bound may differ.
    assert int((ours.isfinite() != theirs.isfinite()).sum(-1).max()) <= 1


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=300), st.floats(1e-5, 0.99))
def test_a_token_stays_iff_it_reaches_the_floor_or_is_the_best(run_stage, values, epsilon):
    logits = torch.tensor([values], dtype=torch.float32)
    probs = logits.double().softmax(-1)[0]
    entropy = -float((probs * probs.log()).sum())
    floors = {Eta: min(epsilon, math.sqrt(epsilon) * math.exp(-entropy)), Epsilon: epsilon}
    for stage, floor in floors.items():
        kept = run_stage(stage, params(stage, epsilon), logits)[0].isfinite()
        for p, is_kept in zip(probs, kept.tolist(), strict=True):
            assert is_kept == bool(p >= floor or p == probs.max()) or abs(float(p) / floor - 1) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_measures_inside_the_interval_only(run_stage, stage):
    logits = torch.tensor([[9.0, 1.0, 0.0, -5.0]])
    interval = (torch.tensor([-1.0]), torch.tensor([2.0]))
    # Of the two that are left p is 0.731 and 0.269; of all four the second would have 0.0003.
    assert run_stage(stage, params(stage, 0.1), logits, interval).isfinite().tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("stage", STAGES)
def test_zero_is_the_identity(run_stage, random_logits, stage):
    logits = random_logits(2, 300)
    assert torch.equal(run_stage(stage, params(stage, 0, 0), logits), logits)


@pytest.mark.parametrize("value", [np.float64(0.25), torch.tensor(0.25), np.array(0.25)])
def test_numbers_of_numpy_and_torch_are_numbers(run_stage, random_logits, value):
    logits = random_logits(1, 50)
    assert torch.equal(run_stage(Eta, params(Eta, value), logits), run_stage(Eta, params(Eta, 0.25), logits))


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), True, "0.1", None])
@pytest.mark.parametrize("stage", STAGES)
def test_epsilon_outside_of_its_range_is_refused(run_stage, stage, value):
    where = rf"extra_args\.{stage.spec.name}\.epsilon must be (in \[0, 1\)|a number), got"
    with pytest.raises(ValueError, match=where):
        run_stage(stage, params(stage, value), torch.zeros(1, 4))
