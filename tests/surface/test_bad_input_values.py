"""NaN, infinities, bools and other wrong values in every numeric field, of parameters and of the configuration."""

import math

import numpy as np
import pytest
import torch

from framework import SamplingParams
from framework.config import Config, EngineOptions, KVCacheConfig, SchedulerConfig
from framework.errors import ConfigError

NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "True": True, "False": False}
OTHERS = {"text": "5", "bytes": b"5", "list": [1], "complex": 1j, "object": object, "tensor": torch.ones(2, 2),
          "numpy nan": np.float64("nan"), "digits": 10**5000}  # fmt: skip
PARAMS = ("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
          "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")  # fmt: skip
ENDLESS = {("top_k", "digits"), ("logprobs", "digits"), ("prompt_logprobs", "digits"), ("max_tokens", "digits")}
"""More than there can be means no limit, or is refused once the vocabulary is known."""


CASES = [(name, what) for name in PARAMS for what in (*NUMBERS, *OTHERS) if (name, what) not in ENDLESS]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_wrong_number_of_a_parameter_is_refused_in_one_line_by_field_and_value(name, what):
    value = {**NUMBERS, **OTHERS}[what]
    with pytest.raises((TypeError, ValueError)) as caught:
        SamplingParams(**{name: value})
    text = str(caught.value)
    assert f"SamplingParams.{name}" in text or f"{name} (" in text
    assert "got " in text or "must not exceed" in text
    assert "\n" not in text and len(text) < 400


CONFIGS = {
    EngineOptions: ("engine", ("max_model_len", "seed")),
    KVCacheConfig: ("kv_cache", ("block_size", "num_blocks", "num_swap_blocks", "memory_fraction")),
    SchedulerConfig: ("scheduler", ("max_num_seqs", "max_num_batched_tokens")),
}
FIELDS = [(cls, path, name) for cls, (path, names) in CONFIGS.items() for name in names]


@pytest.mark.parametrize(("cls", "path", "name"), FIELDS, ids=[f"{path}.{name}" for _, path, name in FIELDS])
@pytest.mark.parametrize("what", [*NUMBERS, "text", "list", "tensor"])
def test_wrong_number_of_a_configuration_is_refused_in_one_line_by_key_and_value(cls, path, name, what):
    with pytest.raises(ConfigError) as caught:
        cls(**{name: {**NUMBERS, **OTHERS}[what]})
    text = str(caught.value)
    assert text.startswith(f"{path}.{name}=") and "\n" not in text and len(text) < 400


@pytest.mark.parametrize("name", ["engine", "kv_cache", "scheduler", "sampler", "backend", "trace"])
def test_part_of_a_configuration_of_another_type_is_named(name):
    with pytest.raises(ConfigError, match=rf"^{name}=5 must be "):
        Config(**{name: 5})


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize("name", SamplingParams.defaults())
def test_value_whose_repr_fails_is_refused_by_field_and_type(name):
    with pytest.raises((TypeError, ValueError), match=rf"SamplingParams\.{name}.*got a value of type Unprintable"):
        SamplingParams(**{name: Unprintable()})
