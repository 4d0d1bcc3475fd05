"""Stage `allowed_ids`: exactly the listed tokens are left."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import SamplingParams
from framework_samplers.allowed_ids import AllowedIds, packed_bits


@pytest.mark.parametrize("vocab", [31, 32, 33, 100])
def test_listed_tokens_keep_their_logits_and_no_other_does(run_stage, random_logits, vocab):
    logits = random_logits(3, vocab)
    lists = [[0], [vocab - 1, 5, 5], range(vocab)]
    got = run_stage(AllowedIds, [SamplingParams(allowed_token_ids=list(ids)) for ids in lists], logits)
    for row, ids in enumerate(lists):
        kept = torch.full((vocab,), -torch.inf)
        kept[list(ids)] = logits[row, list(ids)]
        assert torch.equal(got[row], kept)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 99), min_size=1))
def test_bits_are_those_of_the_ids(ids):
    words = packed_bits(ids, 100)
    assert words.dtype == np.int32 and len(words) == 4
    assert {32 * w + b for w in range(4) for b in range(32) if int(words[w]) >> b & 1} == ids


def test_id_outside_of_the_vocabulary_is_refused_by_field_value_and_range(driven):
    with pytest.raises(ValueError, match=r"allowed_token_ids holds 20, outside the vocabulary 0\.\.19"):
        driven(AllowedIds, 20).stage.validate(SamplingParams(allowed_token_ids=[3, 20]))
