"""SamplingParams: ranges, types, unknown names; which of several values wins; what a pipeline refuses."""

import json
import logging
import math
import shutil

import numpy as np
import pytest
import torch

import framework
from framework import LLM, SamplingParams, StructuredOutputsParams
from framework.errors import ConfigError, RequestError

SMALL = ("engine.dtype=float32", "engine.max_model_len=32", "kv_cache.num_blocks=16")
NAN, INF = math.nan, math.inf


def test_defaults_are_those_of_the_public_surface():
    expected = {
        "n": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": None, "max_tokens": 16, "min_tokens": 0,
        "stop": None, "bad_words": None, "stop_token_ids": None,
        "ignore_eos": False, "include_stop_str_in_output": False, "logprobs": None,
        "prompt_logprobs": None, "logprob_token_ids": None, "logit_bias": None, "allowed_token_ids": None,
        "bad_words_token_ids": None, "structured_outputs": None, "detokenize": True, "skip_special_tokens": True,
        "stages": None, "extra_args": None,
    }  # fmt: skip
    params = SamplingParams()
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.output_kind.value == "final"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, 128]),
        ("temperature", [0, 0.0, 1e-9, 2, 1e300]),
        ("top_k", [-1, 0, 1, 10**9]),
        ("top_p", [1e-9, 1, 0.5]),
        ("min_p", [0, 1, 0.05]),
        ("repetition_penalty", [1e-9, 10]),
        ("frequency_penalty", [-2, 2]),
        ("presence_penalty", [-2, 2]),
        ("seed", [-(2**63), 2**64 - 1, 0, None]),
        ("max_tokens", [1, 10**9, None]),
        ("min_tokens", [0, 16]),
        ("stop", ["a", ["a", "b"], [], None]),
        ("stop_token_ids", [[0, 5], [], None]),
        ("logprobs", [-1, 0, 5, None]),
        ("prompt_logprobs", [-1, 0, 5, None]),
        ("logit_bias", [{3: -100}, {3: 100.0}, {}, None]),
        ("allowed_token_ids", [[0], None]),
        ("structured_outputs", [{"regex": "a+"}, StructuredOutputsParams(choice=("a", "b")), None]),
        ("output_kind", ["final", "cumulative", "delta"]),
        ("stages", [{"top_p": False}, None]),
        ("extra_args", [{"mine": {"x": 1}}, None]),
    ],
)
def test_every_value_inside_the_range_is_taken(name, values):
    for value in values:
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("n", 0, ValueError, r"1\.\.128, got 0"),
        ("n", 129, ValueError, r"1\.\.128, got 129"),
        ("n", True, TypeError, "an integer, got True"),
        ("n", 1.0, TypeError, "an integer, got 1.0"),
        ("temperature", -0.1, ValueError, "got -0.1"),
        ("temperature", NAN, ValueError, "got nan"),
        ("temperature", INF, ValueError, "must be finite and at least 0, got inf"),
        ("temperature", 10**400, ValueError, "got 1000"),
        ("temperature", "1", TypeError, "a number, got '1'"),
        ("temperature", True, TypeError, "a number, got True"),
        ("temperature", None, TypeError, "a number, got None"),
        ("top_k", -2, ValueError, "at least -1, got -2"),
        ("top_k", 1.5, TypeError, "an integer, got 1.5"),
        ("top_p", 0, ValueError, r"\(0, 1\], got 0"),
        ("top_p", 1.01, ValueError, r"\(0, 1\], got 1.01"),
        ("top_p", NAN, ValueError, r"\(0, 1\], got nan"),
        ("min_p", -0.01, ValueError, r"\[0, 1\], got -0.01"),
        ("min_p", 1.01, ValueError, r"\[0, 1\], got 1.01"),
        ("repetition_penalty", 0, ValueError, r"\(0, 10\], got 0"),
        ("repetition_penalty", 10.5, ValueError, r"\(0, 10\]"),
        ("frequency_penalty", -2.1, ValueError, r"\[-2, 2\]"),
        ("presence_penalty", 2.1, ValueError, r"\[-2, 2\]"),
        ("seed", 2**64, ValueError, "got 18446744073709551616"),
        ("seed", -(2**63) - 1, ValueError, "got -9223372036854775809"),
        ("seed", 1.0, TypeError, "an integer, got 1.0"),
        ("max_tokens", 0, ValueError, "at least 1, got 0"),
        ("max_tokens", True, TypeError, "an integer, got True"),
        ("min_tokens", -1, ValueError, "at least 0"),
        ("min_tokens", 17, ValueError, r"min_tokens \(17\) must not exceed max_tokens \(16\)"),
        ("stop", "", ValueError, "must not hold an empty string"),
        ("stop", ["a", 1], TypeError, "strings only, got 1"),
        ("stop", 5, TypeError, "a string or a list of strings"),
        ("stop_token_ids", [-1], ValueError, "at least 0, got -1"),
        ("stop_token_ids", [True], TypeError, "an integer, got True"),
        ("stop_token_ids", [5, "a"], TypeError, r"stop_token_ids\[1\] must be an integer, got 'a'"),
        ("stop_token_ids", 5, TypeError, "a list of token ids"),
        ("ignore_eos", 1, TypeError, "True or False, got 1"),
        ("detokenize", None, TypeError, "True or False, got None"),
        ("logprobs", -2, ValueError, "at least -1, got -2"),
        ("logprobs", True, TypeError, "an integer, got True"),
        ("prompt_logprobs", -2, ValueError, "at least -1"),
        ("logit_bias", {3: 101}, ValueError, r"logit_bias\[3\] must be in \[-100, 100\]"),
        ("logit_bias", {"3": 1}, TypeError, "logit_bias key must be an integer, got '3'"),
        ("logit_bias", [3], TypeError, "must map token ids to numbers"),
        ("allowed_token_ids", [], ValueError, "must not be empty; leave it out to allow every token"),
        ("bad_words_token_ids", [[5], []], ValueError, r"ids\[1\] must not be empty; leave that word out"),
        ("bad_words_token_ids", [None], TypeError, r"ids\[0\] must be a list of token ids, got None"),
        ("bad_words_token_ids", [[5, "a"]], TypeError, r"ids\[0\]\[1\] must be an integer, got 'a'"),
        ("seed", np.True_, TypeError, "an integer, got True"),
        ("seed", torch.tensor(True), TypeError, "an integer, got True"),
        ("seed", np.float32(1), TypeError, "an integer, got 1.0"),
        ("seed", np.array([1]), TypeError, r"an integer, got \[1\]"),
        ("temperature", np.True_, TypeError, "a number, got True"),
        ("temperature", np.float32(math.nan), ValueError, "got nan"),
        ("stop_token_ids", np.array([True]), TypeError, "an integer, got True"),
        ("stop_token_ids", np.array([1.0]), TypeError, "an integer, got 1.0"),
        ("structured_outputs", {}, ValueError, "exactly one"),
        ("structured_outputs", {"regex": "a", "json": "{}"}, ValueError, "exactly one"),
        ("structured_outputs", {"regx": "a"}, TypeError, r"no parameter 'regx'. Did you mean 'regex'\?"),
        ("structured_outputs", "a+", TypeError, "a dict or StructuredOutputsParams"),
        ("output_kind", "all", ValueError, "final, cumulative, delta, got 'all'"),
        ("stages", {"top_p": 0}, TypeError, r"stages\[top_p\] must be True or False"),
        ("extra_args", {"mine": 1}, TypeError, "must map stage names to dicts"),
    ],
)
def test_value_outside_is_refused_at_construction_with_field_value_and_range(name, value, kind, message):
    with pytest.raises(kind, match=message) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value) or name == "structured_outputs"


NUMBERS = [("seed", -1), ("top_k", 7), ("max_tokens", 5), ("min_tokens", 2), ("n", 2), ("logprobs", 3)]


@pytest.mark.parametrize(("name", "number"), NUMBERS)
@pytest.mark.parametrize("kind", [np.int64, np.int16, torch.tensor])
def test_integers_of_numpy_and_torch_are_taken_as_ints(kind, name, number):
    value = getattr(SamplingParams(**{name: kind(number)}), name)
    assert value == number and type(value) is int


@pytest.mark.parametrize("kind", [np.float32, np.float16, torch.tensor])
def test_numbers_of_numpy_and_torch_are_taken_as_floats(kind):
    params = SamplingParams(temperature=kind(0.5), logit_bias={np.int64(3): kind(0.25)})
    assert (params.temperature, params.logit_bias) == (0.5, {3: 0.25})
    assert type(params.temperature) is float and type(next(iter(params.logit_bias))) is int


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids]])
def test_token_ids_may_stand_in_an_array(kind):
    params = SamplingParams(stop_token_ids=kind([4, 5]), bad_words_token_ids=[kind([4]), kind([5])])
    assert (params.stop_token_ids, params.bad_words_token_ids) == ((4, 5), ((4,), (5,)))
    assert all(type(i) is int for i in params.stop_token_ids)


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"no parameter 'temprature'. Did you mean 'temperature'\?"):
        SamplingParams(temprature=1)


def test_detokenize_false_refuses_stop_strings_and_bad_words():
    for name in ("stop", "bad_words"):
        wanted = rf"\.{name}=\['a'\] needs text, but detokenize=False; use {name}_token_ids, or"
        with pytest.raises(ValueError, match=wanted):
            SamplingParams(detokenize=False, **{name: ["a"]})


def test_replace_keeps_values_and_what_the_caller_named():
    params = SamplingParams(temperature=0.5, stop_token_ids=[1])
    object.__setattr__(params, "named", frozenset({"stop_token_ids"}))  # as if a checkpoint had said the temperature
    changed = params.replace(max_tokens=3)
    assert (changed.temperature, changed.stop_token_ids, changed.max_tokens) == (0.5, (1,), 3)
    assert changed.named == {"stop_token_ids", "max_tokens"}
    with pytest.raises(TypeError, match="no parameter 'max_token'"):
        params.replace(max_token=3)


@pytest.mark.parametrize(("params", "message"), [
    ({"stop_token_ids": [24]}, r"stop_token_ids holds 24, outside the vocabulary 0\.\.23"),
    ({"logprobs": 25}, "logprobs=25 is more than the vocabulary of 24 tokens"),
    ({"stages": {"topp": False}}, r"stages names 'topp'.*Did you mean 'top_p'\?"),
    ({"stages": {"gumbel": False}}, "stages cannot switch 'gumbel' off"),
    ({"stages": {"top_p": False}, "top_p": 0.5}, "switches off 'top_p'.*reads top_p=0.5"),
    ({"extra_args": {"mine": {"x": 1}}}, "extra_args names 'mine'"),
    ({"extra_args": {"top_p": {"x": 1}}}, "top_p"),
])  # fmt: skip
def test_what_needs_the_model_is_refused_at_admission_with_the_index(mixed, params, message):
    before = mixed.engine.stats()
    with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
        mixed.generate([[4], [5]], [SamplingParams(), SamplingParams(**params)])
    assert mixed.engine.stats() == before


# -------------------------------------------------------------------------------------------- which values win


def with_generation_config(folders, tmp_path, **values):
    folder = tmp_path / "model"
    shutil.copytree(folders["mixed"], folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def defaults(folder, *words):
    with LLM(folder, overrides=[*SMALL, *words]) as llm:
        return llm.engine.admission.defaults


def test_config_stands_over_the_checkpoint_and_that_over_the_class(folders, tmp_path):
    folder = with_generation_config(folders, tmp_path, temperature=0.25, top_k=7, top_p=None, eos_token_id=3)
    found = defaults(folder, "sampler.temperature=0.5", "sampler.max_tokens=4")
    assert (found.temperature, found.top_k, found.top_p, found.max_tokens) == (0.5, 7, 1.0, 4)
    assert found.named == {"temperature", "max_tokens"}


def test_defaults_serve_no_parameters_and_passed_ones_are_used_as_written(folders):
    with LLM(folders["mixed"], overrides=[*SMALL, "sampler.temperature=0", "sampler.max_tokens=3",
                                          "sampler.ignore_eos=true"]) as llm:  # fmt: skip
        none, passed = llm.generate([[4], [4]], [None, SamplingParams(seed=1, max_tokens=5, ignore_eos=True)])
        assert none.outputs[0].token_ids == llm.generate([4])[0].outputs[0].token_ids
        assert len(none.outputs[0].token_ids) == 3
        assert len(passed.outputs[0].token_ids) == 5
        drawn = {tuple(llm.generate([4], SamplingParams(seed=s, max_tokens=2))[0].outputs[0].token_ids)
                 for s in range(12)}  # fmt: skip
        assert len(drawn) > 3  # the temperature of 0 in the config does not reach them


def test_checkpoint_alone_makes_a_greedy_default(folders, tmp_path):
    folder = with_generation_config(folders, tmp_path, top_k=1)
    with LLM(folder, overrides=SMALL) as llm:
        first, second = llm.generate([[4], [4]])
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert first.outputs[0].token_ids == llm.generate([4], SamplingParams(temperature=0))[0].outputs[0].token_ids


def test_what_only_the_checkpoint_says_refuses_nothing_but_is_logged(folders, tmp_path, caplog):
    folder = with_generation_config(folders, tmp_path, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    with caplog.at_level(logging.WARNING, "framework"), LLM(folder, overrides=[*SMALL, "sampler=greedy"]) as llm:
        assert llm.generate([4])[0].outputs[0].token_ids
    said = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert [text.split()[0] for text in said] == ["temperature", "top_p"]


def test_wrong_value_in_generation_config_is_a_config_error(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"generation_config.json: .*top_p must be in \(0, 1\], got 7"):
        LLM(with_generation_config(folders, tmp_path, top_p=7), overrides=SMALL)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_greedy_sampler_refuses_a_named_temperature_naming_both(folders, temperature):
    with LLM(folders["mixed"], overrides=[*SMALL, "sampler=greedy"]) as llm:
        with pytest.raises(RequestError, match=f"sampler=greedy.*temperature={temperature:g}"):
            llm.generate([4], SamplingParams(temperature=temperature))
        unnamed, zero = llm.generate([[4], [4]], [SamplingParams(), SamplingParams(temperature=0)])
        assert unnamed.outputs[0].token_ids == zero.outputs[0].token_ids


@pytest.mark.parametrize(("words", "kind", "message"), [
    (["sampler=greedy", "sampler.temperature=0.7"], ConfigError, r"defaults of sampler\.<param>: .*temperature=0\.7"),
    (["sampler.structured_outputs={regex:a}"], ConfigError, "structured_outputs: .* which no grammar can follow"),
    (["sampler.logit_bias={99:1.0}"], ConfigError, "logit_bias holds 99, outside the vocabulary"),
    (["sampler.stop_token_ids=[99]"], ConfigError, "stop_token_ids holds 99"),
])  # fmt: skip
def test_configured_default_that_cannot_be_served_is_refused_at_start_up(folders, words, kind, message):
    with pytest.raises(kind, match=message):
        LLM(folders["mixed"], overrides=[*SMALL, *words])


def test_public_names_are_lazy_and_complete():
    names = {"LLM", "SamplingParams", "StructuredOutputsParams", "PoolingParams", "RequestOutput", "CompletionOutput",
             "Logprob", "API_VERSION", "__version__"}  # fmt: skip
    assert names <= set(dir(framework))
    assert all(getattr(framework, name) is not None for name in names)
