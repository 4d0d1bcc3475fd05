"""min_p keeps what is at least min_p times as likely as the best token of the incoming interval."""

import math

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper

from framework import SamplingParams
from framework_samplers.min_p import MinP


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.3, 0.9])
def test_agrees_with_transformers(run_stage, random_logits, min_p):
    logits = random_logits(6, 500)
    ours = run_stage(MinP, [SamplingParams(min_p=min_p)] * 6, logits)
    assert torch.equal(ours, MinPLogitsWarper(min_p)(None, logits))


def test_keeps_a_token_exactly_at_the_bound(run_stage):
    bound = 2.0 + torch.tensor(math.log(0.25))
    below = torch.nextafter(bound, torch.tensor(-9.0))
    ours = run_stage(MinP, [SamplingParams(min_p=0.25)], torch.stack((torch.tensor(2.0), bound, below)).unsqueeze(0))
    assert ours.isfinite().tolist() == [[True, True, False]]


def test_one_keeps_the_best_and_its_equals(run_stage):
    ours = run_stage(MinP, [SamplingParams(min_p=1.0)], torch.tensor([[1.0, 2.0, 2.0, 1.9999]]))
    assert ours.isfinite().tolist() == [[False, True, True, False]]


def test_zero_is_the_identity(run_stage, random_logits):
    logits = random_logits(2, 300)
    assert torch.equal(run_stage(MinP, [SamplingParams(min_p=0.0)] * 2, logits), logits)


def test_measures_from_the_best_token_inside_the_interval(run_stage):
    logits = torch.tensor([[5.0, 2.0, 1.5, 0.0]])
    interval = (torch.tensor([0.5]), torch.tensor([2.0]))
    ours = run_stage(MinP, [SamplingParams(min_p=0.5)], logits, interval)
    assert ours.isfinite().tolist() == [[False, True, True, False]]
