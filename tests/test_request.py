"""What SamplingParams takes for a list, and what a copy keeps of the names that the caller wrote."""

import copy
import dataclasses
import pickle

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


def test_changed_copy_keeps_what_the_caller_named_and_adds_its_changes():
    params = SamplingParams(top_k=3)
    for replace in (SamplingParams.replace, dataclasses.replace):
        changed = replace(params, seed=1)
        assert (changed.named, changed.top_k, changed.seed) == ({"top_k", "seed"}, 3, 1)
        assert replace(changed, stop="a", stages={"top_p": False}).named == {"top_k", "seed", "stop", "stages"}
        with pytest.raises(TypeError, match=r"no parameter 'max_token'. Did you mean 'max_tokens'\?"):
            replace(params, max_token=3)
        with pytest.raises(ValueError, match=r"max_tokens must be at least 1, got 0"):
            replace(params, max_tokens=0)


def test_change_to_the_value_that_stands_there_is_named_by_replace_alone():
    assert SamplingParams().replace(temperature=1.0).named == {"temperature"}
    params = SamplingParams()
    assert dataclasses.replace(params, temperature=params.temperature).named == set()


@pytest.mark.parametrize(
    "made", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_keep_values_and_what_the_caller_named(made):
    params = SamplingParams(top_k=3, stop=["a"], stages={"top_p": False})
    assert (made(params), made(params).named) == (params, {"top_k", "stop", "stages"})


def test_where_a_copy_comes_from_is_no_parameter():
    assert "_source" not in SamplingParams.defaults() and "_source" not in repr(SamplingParams())
    with pytest.raises(TypeError, match="no parameter '_source'"):
        SamplingParams(_source=1)


def test_equal_parameters_have_one_hash_mappings_too():
    asked = {"stop": ["a"], "stages": {"top_p": False}, "logit_bias": {5: 1.0}, "structured_outputs": {"json": {}}}
    first, second = SamplingParams(**asked), SamplingParams(**asked)
    assert first == second and len({first, second, SamplingParams(), SamplingParams(seed=1)}) == 3
