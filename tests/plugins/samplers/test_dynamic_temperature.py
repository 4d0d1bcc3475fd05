"""dynamic_temperature follows the entropy of the row between two temperatures."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework import SamplingParams
from framework.testing.stages import CHECKS, StageCase, context
from framework_samplers.dynamic_temperature import DynamicTemperature

STAGE = DynamicTemperature


def params(**given):
    return SamplingParams(extra_args={"dynamic_temperature": given})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    wanting = (params(low=0.5, high=1.5), params(low=0, high=100, exponent=0.3), params(high=2, exponent=10))
    check(StageCase(STAGE, wanting, (params(low=1, high=1), SamplingParams(temperature=0))))


def divisor(logits, low, high, exponent):
    """What the source divides by, in float64."""
    probs = logits.double()[logits.isfinite()].softmax(-1)
    entropy = -float((probs * probs.log()).nansum())
    return max(low + (high - low) * (entropy / math.log(len(probs))) ** exponent, 1e-5)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=300),
    st.floats(0.3, 1), st.floats(1, 5), st.floats(0.5, 10),
)  # fmt: skip
def test_agrees_with_the_definition(run_stage, values, low, high, exponent):
    logits = torch.tensor([[*values, float("-inf")]])
    ours = run_stage(STAGE, [params(low=low, high=high, exponent=exponent)], logits)
    expected = logits.double() / divisor(logits, low, high, exponent)
    # Sums of float32 weights are good to 1e-7 of the whole, and so is an entropy near 0: its root to 3e-4 of `high`.
    torch.testing.assert_close(ours.double(), expected, rtol=1e-2, atol=1e-5)


def test_agrees_with_the_definition_to_rounding_where_the_entropy_is_not_near_zero(run_stage, random_logits):
    logits = random_logits(3, 3001)
    ours = run_stage(STAGE, [params(low=0.2, high=3.0, exponent=1.7)] * 3, logits)
    expected = torch.stack([row.double() / divisor(row, 0.2, 3.0, 1.7) for row in logits])
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_flat_row_has_the_high_temperature_and_a_sure_one_the_low(run_stage):
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [100.0, 0.0, 0.0, 0.0]])
    ours = run_stage(STAGE, [params(low=0.5, high=2.0)] * 2, logits)
    torch.testing.assert_close(ours, logits / torch.tensor([[2.0], [0.5]]))


@pytest.mark.parametrize("given", [{}, {"low": 1, "high": 1}, {"low": 1.0, "high": 1.0, "exponent": 3}])
def test_one_is_the_identity(run_stage, random_logits, given):
    logits = random_logits(2, 300)
    assert torch.equal(run_stage(STAGE, [params(**given)] * 2, logits), logits)
    assert not STAGE({}, context(STAGE.spec)).wants(params(**given))


def test_is_off_for_greedy_rows():
    greedy = SamplingParams(temperature=0, extra_args={"dynamic_temperature": {"low": 0.5}})
    assert not STAGE({}, context(STAGE.spec)).wants(greedy)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"low": -1}, r"low must be in \[0, 100\], got -1"),
        ({"low": 2, "high": 1}, r"high must be in \[2, 100\], got 1"),
        ({"high": 101}, r"high must be in \[1, 100\], got 101"),
        ({"exponent": 0}, r"exponent must be in \(0, 10\], got 0"),
        ({"low": None}, r"low must be a number, got None"),
    ],
)
def test_parameters_outside_of_their_range_are_refused(run_stage, given, message):
    with pytest.raises(ValueError, match=rf"extra_args\.dynamic_temperature\.{message}"):
        run_stage(STAGE, [params(**given)], torch.zeros(1, 4))
