"""Temperature divides logits, exactly neutral where it is off, and never makes a masked token possible."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper

from framework import SamplingParams
from framework_samplers.temperature import Temperature


@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.7, 1.3, 7.5])
def test_agrees_with_transformers(run_stage, random_logits, temperature):
    logits = random_logits(2, 500)
    ours = run_stage(Temperature, [SamplingParams(temperature=temperature)] * 2, logits)
    torch.testing.assert_close(ours, TemperatureLogitsWarper(temperature)(None, logits), rtol=1e-6, atol=0)


def test_multiplies_by_the_float32_reciprocal(run_stage, random_logits):
    logits = random_logits(1, 100)
    ours = run_stage(Temperature, [SamplingParams(temperature=0.3)], logits)
    assert np.array_equal(ours.numpy(), logits.numpy() * (np.float32(1) / np.float32(0.3)))


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0}, {"temperature": 0.5, "top_k": 1}])
def test_is_off_for_one_and_for_greedy_rows(params):
    from framework.testing.stages import context

    assert not Temperature({}, context(Temperature.spec)).wants(SamplingParams(**params))


@pytest.mark.parametrize("temperature", [1e38, 1e300, 1.7e308])
def test_a_huge_temperature_keeps_masks(run_stage, temperature):
    logits = torch.tensor([[3.0, float("-inf"), -2.0]])
    ours = run_stage(Temperature, [SamplingParams(temperature=temperature)], logits)
    assert ours[0, 1] == float("-inf")
    assert ours[0, [0, 2]].abs().max() < 1e-30
    inverse = run_stage(Temperature, [SamplingParams(temperature=temperature)], torch.ones(1, 1))
    assert inverse >= torch.finfo(torch.float32).tiny  # a device may take less for 0, and 0 times a mask is no number
