"""What SamplingParams takes for a list, and what a copy keeps of the names that the caller wrote."""

import dataclasses

import pytest

from framework import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", {"a": 1}),
        ("bad_words", {"a": 1}),
        ("stop_token_ids", {5: 1}),
        ("allowed_token_ids", {5: 1}),
        ("logprob_token_ids", {5: 1}),
        ("bad_words_token_ids", [{5: 1}]),
        ("bad_words_token_ids", {5: [1]}),
    ],
)
def test_mapping_is_no_list(name, value):
    with pytest.raises(TypeError, match=rf"SamplingParams\.{name}(\[0\])? must be .*list"):
        SamplingParams(**{name: value})


def test_replace_keeps_what_the_caller_named_and_dataclasses_replace_names_every_field():
    params = SamplingParams(top_k=3)
    assert params.replace(seed=1).named == {"top_k", "seed"}
    assert dataclasses.replace(params, seed=1).named == set(SamplingParams.defaults())
