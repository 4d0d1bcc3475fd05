"""Stage `min_tokens`, against the transformers processor of its name and by exact values."""

from dataclasses import replace

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor

from framework import SamplingParams
from framework.testing.stages import context, make_rows, new_request
from framework_samplers.min_tokens import MAX_IDS, MinTokens

VOCAB = 40
PROMPT = 3  # tokens of every request of the kit


def built(eos=(), rows=4):
    kit = context(MinTokens.spec, VOCAB, rows)
    return MinTokens({}, replace(kit, eos_token_ids=eos))


def applied(stage, params, drawn, logits):
    """Logits of a request with these parameters that has drawn so many tokens."""
    stage.validate(params)
    stage.add_request(1, params, new_request(1, params))
    out = logits.clone()
    stage.apply(out, make_rows([1], positions=[PROMPT + drawn]))
    return out


@pytest.mark.parametrize("drawn", range(5))
def test_logits_equal_those_of_transformers(drawn, random_logits):
    logits, ids = random_logits(1, VOCAB), [5, 0, 39]
    oracle = MinNewTokensLengthLogitsProcessor(PROMPT, 3, ids, device="cpu")
    expected = oracle(torch.zeros(1, PROMPT + drawn, dtype=torch.int64), logits.clone())
    got = applied(built(eos=(5,)), SamplingParams(min_tokens=3, stop_token_ids=[0, 39]), drawn, logits)
    assert torch.equal(got, expected)
    assert torch.isinf(got).sum() == (3 if drawn < 3 else 0)


def test_eos_that_does_not_end_the_request_is_not_masked(random_logits):
    logits, stage = random_logits(1, VOCAB), built(eos=(5,))
    got = applied(stage, SamplingParams(min_tokens=3, ignore_eos=True, stop_token_ids=[7]), 0, logits)
    assert torch.isinf(got).nonzero().tolist() == [[0, 7]]
    assert not stage.wants(SamplingParams(min_tokens=3, ignore_eos=True))


def test_more_ids_than_a_row_has_places_for_are_refused():
    stage, ids = built(eos=(5,)), list(range(MAX_IDS + 1))
    stage.validate(SamplingParams(stop_token_ids=ids))
    stage.validate(SamplingParams(min_tokens=1, stop_token_ids=ids[1:]))
    with pytest.raises(ValueError, match=r"min_tokens=1 would mask 257 ids, .*at most 256 are possible; pass fewer"):
        stage.validate(SamplingParams(min_tokens=1, stop_token_ids=ids))
