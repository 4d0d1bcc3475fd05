"""Stage `logit_bias`, against the transformers processor and bit for bit where nothing is added."""

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

from framework import SamplingParams
from framework_samplers.logit_bias import MAX_ENTRIES, LogitBias

BIASES = ({3: 1.5, 0: -2.0, 19: 100.0}, {7: -100.0}, {i: i / 10 - 1 for i in range(20)})


def test_logits_equal_those_of_transformers(run_stage, random_logits):
    logits = random_logits(len(BIASES), 20)
    got = run_stage(LogitBias, [SamplingParams(logit_bias=bias) for bias in BIASES], logits)
    for row, bias in enumerate(BIASES):
        oracle = SequenceBiasLogitsProcessor([[[i], value] for i, value in bias.items()])
        expected = oracle(torch.zeros(1, 1, dtype=torch.int64), logits[row : row + 1].clone())
        assert torch.equal(got[row : row + 1], expected)


def test_what_is_not_named_keeps_every_bit(run_stage):
    logits = torch.tensor([[-0.0, 0.0, -torch.inf, 1.0]] * 2)
    got = run_stage(LogitBias, [SamplingParams(logit_bias={3: 1.0}), SamplingParams(logit_bias={1: 0.5, 2: 9})], logits)
    assert torch.signbit(got[:, 0]).all() and not torch.signbit(got[0, 1])
    assert got.tolist() == [[0.0, 0.0, -torch.inf, 2.0], [0.0, 0.5, -torch.inf, 1.0]]


def test_ids_outside_of_the_vocabulary_and_too_many_are_refused(driven):
    stage = driven(LogitBias, 2000).stage
    stage.validate(SamplingParams(logit_bias=dict.fromkeys(range(MAX_ENTRIES), 1.0)))
    with pytest.raises(ValueError, match=r"logit_bias has 1025 ids and at most 1024 are possible; pass fewer"):
        stage.validate(SamplingParams(logit_bias=dict.fromkeys(range(MAX_ENTRIES + 1), 1.0)))
    with pytest.raises(ValueError, match=r"logit_bias holds 2000, outside the vocabulary 0\.\.1999"):
        stage.validate(SamplingParams(logit_bias={2000: 1.0}))
