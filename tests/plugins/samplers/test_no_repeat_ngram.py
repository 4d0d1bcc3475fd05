"""Stage `no_repeat_ngram`, against the transformers processor of its name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from framework import SamplingParams
from framework.sampling.history import ngram_ends as ends
from framework_samplers import no_repeat_ngram
from framework_samplers.no_repeat_ngram import NoRepeatNgram


def sized(size, **more):
    return SamplingParams(extra_args={"no_repeat_ngram": {"size": size}}, **more)


def expected(size, tokens, logits):
    return NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), logits.clone())[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 3), min_size=1, max_size=30)), min_size=1, max_size=5)
)
def test_logits_equal_those_of_transformers_in_a_mixed_batch(driven, requests):
    one, logits = driven(NoRepeatNgram, 4), torch.arange(4.0).unsqueeze(0)
    for size, tokens in requests:
        one.add(sized(size, max_tokens=30), tokens[:2], tokens[2:])
    for row, request in zip(one.apply(logits), requests, strict=True):
        assert torch.equal(row, expected(*request, logits))


def test_rows_of_drafts_see_the_drafts_before_them(driven):
    one, logits = driven(NoRepeatNgram, 9), torch.ones(1, 9)
    one.add(sized(2), [1, 2, 3, 1])
    got = one.apply(logits, drafts={1: [3, 2]})
    for row, tokens in zip(got, ([1, 2, 3, 1], [1, 2, 3, 1, 3], [1, 2, 3, 1, 3, 2]), strict=True):
        assert torch.equal(row, expected(2, tokens, logits))


def test_what_stands_behind_the_known_tokens_means_nothing(driven):
    one = driven(NoRepeatNgram, 9)
    one.add(sized(2), [1, 2])
    one.ctx.token_ids[1, 2:] = torch.tensor([1, 2, 5] * 20 + [2**30, -7])
    assert not torch.isinf(one.apply(torch.ones(1, 9))).any()


def test_tokens_that_cannot_be_there_are_not_searched(driven, monkeypatch):
    """As many columns as the longest request may have tokens, of the rows that ask."""
    searched = []
    monkeypatch.setattr(
        no_repeat_ngram, "ngram_ends", lambda tokens, *rest: searched.append(tokens) or ends(tokens, *rest)
    )
    one = driven(NoRepeatNgram, 9)
    one.add(sized(2, max_tokens=5), [1, 2, 1])
    one.add(sized(2, max_tokens=2), [1, 2, 1])
    one.tokens[3] = [1, 2, 1] * 4  # does not want the stage
    got = one.apply(torch.ones(1, 9))
    assert [tokens.shape for tokens in searched] == [(2, 8)]
    assert torch.isinf(got).nonzero().tolist() == [[0, 2], [1, 2]]


@pytest.mark.parametrize("size", [0, -1, 65, 2.5, True, "3", None])
def test_size_out_of_range_is_refused(driven, size):
    with pytest.raises(ValueError, match=r"extra_args\.no_repeat_ngram\.size must be"):
        driven(NoRepeatNgram, 9).stage.validate(sized(size))
