"""top_n_sigma keeps what is at most n standard deviations below the best logit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework import SamplingParams
from framework.testing.stages import CHECKS, StageCase, context
from framework_samplers.temperature import Temperature
from framework_samplers.top_n_sigma import TopNSigma


def params(*values):
    return [SamplingParams(extra_args={"top_n_sigma": {"n": value}}) for value in values]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    check(StageCase(TopNSigma, tuple(params(0.1, 1.0, 1000))))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=300), st.floats(0.01, 5), st.floats(-1e4, 1e4))
def test_agrees_with_the_definition_wherever_the_logits_lie(run_stage, values, n, offset):
    logits = torch.tensor([values], dtype=torch.float32) + offset
    exact = logits.double()
    floor = exact.max() - n * exact.std(correction=0)
    kept = run_stage(TopNSigma, params(n), logits)[0].isfinite()
    unclear = (exact[0] - floor).abs() < 1e-4 * (1 + exact.std(correction=0)) + abs(offset) * 1e-6
    assert bool(((kept == (exact[0] >= floor)) | unclear).all())


def test_masked_tokens_do_not_count(run_stage):
    logits = torch.tensor([[2.0, 1.0, 0.0, float("-inf")]])
    sigma = (2 / 3) ** 0.5
    assert run_stage(TopNSigma, params(0.99 / sigma), logits).isfinite().sum() == 1
    assert run_stage(TopNSigma, params(1.01 / sigma), logits).isfinite().sum() == 2


def test_spread_is_that_inside_the_interval(run_stage):
    logits = torch.tensor([[100.0, 2.0, 1.0, 0.0, -100.0]])
    interval = (torch.tensor([-1.0]), torch.tensor([3.0]))
    ours = run_stage(TopNSigma, params(1.5), logits, interval)
    assert ours.isfinite().tolist() == [[False, True, True, False, False]]


def test_temperature_before_it_changes_nothing(run_stage, random_logits):
    logits = random_logits(1, 3000)
    kept = run_stage(TopNSigma, params(1.0), logits).isfinite()
    heated = run_stage(Temperature, [SamplingParams(temperature=2.0)], logits)
    assert torch.equal(run_stage(TopNSigma, params(1.0), heated).isfinite(), kept)
    assert 1 < kept.sum() < 3000


def test_rows_with_different_n_in_one_batch(run_stage, random_logits):
    logits, values = random_logits(3, 2000), (0.3, 1.0, 2.0)
    together = run_stage(TopNSigma, params(*values), logits)
    for row, n in enumerate(values):
        assert torch.equal(run_stage(TopNSigma, params(n), logits[row : row + 1])[0], together[row])


def test_without_n_a_request_does_not_want_it():
    stage = TopNSigma({}, context(TopNSigma.spec))
    assert not stage.wants(SamplingParams(extra_args={"top_n_sigma": {}}))


@pytest.mark.parametrize("value", [0, -1, 1001, float("inf"), float("nan"), "1"])
def test_n_outside_of_its_range_is_refused(run_stage, value):
    with pytest.raises(ValueError, match=r"extra_args\.top_n_sigma\.n must be (in \(0, 1000\]|a number), got"):
        run_stage(TopNSigma, params(value), torch.zeros(1, 4))
