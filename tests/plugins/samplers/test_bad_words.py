"""Stage `bad_words`, against the transformers processor and by the cases of public reports."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers
from transformers import NoBadWordsLogitsProcessor

from framework import SamplingParams
from framework_samplers.bad_words import MAX_TOKENS, BadWords, spellings

VOCAB = 500
PROMPT = [9, 188]
SPELLED = {"bad": [4], " bad": [5, 6, 7], "x": [8], " x": [9], " ": [2], "none": [], " none": [],
           "far": [VOCAB], " far": []}  # fmt: skip


def spelled(text):
    """As a tokenizer to which a line break is a space like others."""
    return [] if text == "\n" else SPELLED[text.removeprefix("\n")]


def banned(one, **how):
    """{row of logits: ids that are masked}, of logits without a masked one."""
    return [torch.isinf(row).nonzero().squeeze(1).tolist() for row in one.apply(torch.ones(1, VOCAB), **how)]


def words(*ids):
    return SamplingParams(bad_words_token_ids=list(ids))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_logits_equal_those_of_transformers_on_the_output(driven, data):
    ids = st.integers(0, 4)
    lists = st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=6)
    requests = data.draw(st.lists(st.tuples(lists, st.lists(ids, max_size=8)), min_size=1, max_size=3))
    one = driven(BadWords, 6)
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    for forbidden, outputs in requests:
        one.add(words(*forbidden), [0, 1, 2, 3, 4], outputs)
    for row, (forbidden, outputs) in zip(one.apply(logits), requests, strict=True):
        # Given the output alone: transformers would match in the prompt as well.
        oracle = NoBadWordsLogitsProcessor(forbidden, eos_token_id=5)
        expected = oracle(torch.tensor([outputs], dtype=torch.int64), logits.clone())
        assert torch.equal(row, expected[0])


class TestC3:
    """Bad words of several tokens, both spellings, outputs alone."""

    def test_last_token_is_banned_only_behind_the_earlier_ones(self, driven):
        one = driven(BadWords, VOCAB)
        for outputs in ([7, 188], [188, 7], [7], []):
            one.add(words([188, 469]), PROMPT, outputs)
        assert banned(one) == [[469], [], [], []]

    def test_word_of_one_token_is_always_banned(self, driven):
        one = driven(BadWords, VOCAB)
        one.add(words([3], [0]), PROMPT)
        one.add(words([VOCAB - 1]), PROMPT, [3, 3])
        assert banned(one) == [[0, 3], [VOCAB - 1]]

    def test_history_is_the_output_alone(self, driven):
        one = driven(BadWords, VOCAB)
        one.add(words([188, 469], [9, 188, 4], [188, 7, 5]), PROMPT)
        one.add(words([188, 469], [9, 188, 4], [188, 7, 5]), PROMPT, [7])
        assert banned(one) == [[], []]

    def test_strings_are_banned_in_both_spellings_also_when_lengths_differ(self, driven):
        one = driven(BadWords, VOCAB, encode=spelled)
        for word in ("bad", " bad"):
            one.add(SamplingParams(bad_words=word), PROMPT, [5, 6])
        one.add(SamplingParams(bad_words=["x", " "], bad_words_token_ids=[[5, 3]]), PROMPT, [5])
        assert banned(one) == [[4, 7], [4, 7], [2, 3, 8, 9]]

    def test_words_of_different_lengths_do_not_mix(self, driven):
        one = driven(BadWords, VOCAB)
        one.add(words([1, 2, 3, 4], [3, 9], [2, 3, 8], [4]), PROMPT, [1, 2, 3])
        one.add(words([1, 2, 3, 4], [3, 9], [2, 3, 8], [4]), PROMPT, [5, 2, 3])
        one.add(words([6, 7]), PROMPT, [3])
        assert banned(one) == [[4, 8, 9], [4, 8, 9], []]

    def test_rows_of_drafts_see_the_drafts_before_them(self, driven):
        one = driven(BadWords, VOCAB)
        one.add(words([188, 7, 469], [7, 8]), PROMPT, [188])
        one.add(words([3, 4]), PROMPT, [3])
        assert banned(one, drafts={1: [7, 3]}) == [[], [8, 469], [], [4]]


def test_word_is_found_behind_something_where_the_tokenizer_puts_a_space_before_every_text():
    tokens = ["<unk>", "▁fox", "▁", "fox", "\n", "f", "o", "x"]
    backend = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found = set(spellings("fox", lambda text: backend.encode(text).ids))
    assert found == {
        (1,),
        (2, 1),
        (3,),
    }  # as a text of its own or behind a space; with a space before it; behind a bracket


def test_a_spelling_that_merges_with_what_stands_before_it_is_left_out():
    """A word behind a line break is one token with it here: nothing can be cut out of the text."""
    merging = {"fox": [4], " fox": [9, 4], "\n": [7], "\nfox": [8], "\n fox": [7, 9, 4]}
    assert set(spellings("fox", merging.__getitem__)) == {(4,), (9, 4)}


def test_more_tokens_than_a_row_holds_are_refused(driven):
    stage = driven(BadWords, VOCAB).stage
    stage.validate(words([1] * MAX_TOKENS))
    with pytest.raises(ValueError, match=r"bad_words_token_ids and their spellings have 8193 tokens and at most 8192"):
        stage.validate(words([1] * MAX_TOKENS, [2]))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"bad_words_token_ids": [[1], [2, VOCAB]]}, r"bad_words_token_ids holds 500, outside the vocabulary 0\.\.499"),
        ({"bad_words": ["none"]}, r"bad_words holds 'none', of which the tokenizer makes no token"),
        ({"bad_words": ["far"]}, r"bad_words: 'far' holds 500, outside the vocabulary"),
    ],
)
def test_words_that_are_no_tokens_of_the_model_are_refused(driven, params, text):
    with pytest.raises(ValueError, match=text):
        driven(BadWords, VOCAB, encode=spelled).stage.validate(SamplingParams(**params))


def test_strings_need_a_tokenizer(driven):
    with pytest.raises(ValueError, match=r"bad_words=\['x'\] needs text, .*no tokenizer; use bad_words_token_ids"):
        driven(BadWords, VOCAB).stage.validate(SamplingParams(bad_words="x"))
