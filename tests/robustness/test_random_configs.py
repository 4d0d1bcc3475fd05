"""Random words and random Config objects, right and wrong: an engine that runs, or a named error.

Words go through the composer as `LLM(overrides=...)` takes them; Config objects are written by hand and mostly built.
"""

from dataclasses import fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework import LLM, SamplingParams
from framework.config import (
    ComponentConfig,
    Config,
    EngineOptions,
    KVCacheConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    compose,
)
from framework.errors import ConfigError, FrameworkError
from framework.testing.crafted import save_crafted

from .strategies import garbage

CONFIGS = [pytest.param(40, id="quick"), pytest.param(2000, id="full", marks=pytest.mark.full)]
WORDS = [pytest.param(20, id="quick"), pytest.param(1000, id="full", marks=pytest.mark.full)]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def bounded(max_examples):
    return settings(
        max_examples=max_examples, deadline=None, derandomize=max_examples <= 40, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_crafted(tmp_path_factory.mktemp("configs") / "model", torch.eye(24).roll(1, 1) * 8, eos_token_id=3)


def named(error, names):
    """Whether the error is one line that holds one of the names."""
    text = str(error)
    return "\n" not in text and len(text) < 1000 and any(name in text for name in names)


# --------------------------------------------------------------------------------------------------------- Configs

RIGHT = {
    EngineOptions: {
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        "max_model_len": st.none() | st.integers(2, 256),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "async_scheduling": st.none() | st.booleans(),
        "batch_invariant": st.booleans(),
        "graphs": st.sampled_from(["auto", "off"]),
        "load_format": st.sampled_from(["auto", "safetensors", "dummy"]),
    },
    KVCacheConfig: {
        "block_size": st.none() | st.integers(1, 40),
        "num_blocks": st.none() | st.integers(2, 50),
        "num_swap_blocks": st.none() | st.integers(1, 9),
        "memory_fraction": st.none() | st.floats(1e-9, 1e-3),
        "dtype": st.just("auto"),
        "prefix_caching": st.booleans(),
    },
    SchedulerConfig: {
        "max_num_seqs": st.integers(1, 9),
        "max_num_batched_tokens": st.integers(1, 99),
        "chunked_prefill": st.booleans(),
        "preemption": st.sampled_from(["recompute", "swap"]),
    },
    ComponentConfig: {"name": st.sampled_from(["cpu", "fcfs", "priority", "memory", "none", "inprocess", "auto", "x"])},
}  # fmt: skip
TOO_LARGE = st.sampled_from([10**9, 10**14, 10**30])
PARTS = {"engine": EngineOptions, "kv_cache": KVCacheConfig, "scheduler": SchedulerConfig, "policy": ComponentConfig,
         "kv_connector": ComponentConfig, "executor": ComponentConfig}  # fmt: skip


@st.composite
def part(draw, cls):
    """Fields of one part: right ones, and one in six wrong in kind or in size."""
    names = draw(st.lists(st.sampled_from(sorted(RIGHT[cls])), unique=True, max_size=4))
    found = {name: draw(RIGHT[cls][name]) for name in names}
    if draw(st.integers(0, 5)) == 0:
        found[draw(st.sampled_from([field.name for field in fields(cls)]))] = draw(garbage | TOO_LARGE)
    if cls is ComponentConfig:
        found.setdefault("name", draw(RIGHT[cls]["name"]))
    return found


@st.composite
def configs(draw):
    chosen = draw(st.lists(st.sampled_from(sorted(PARTS)), unique=True, max_size=4))
    return {name: draw(part(PARTS[name])) for name in chosen}


@pytest.mark.parametrize("count", CONFIGS)
def test_any_config_is_refused_by_name_or_makes_an_engine_that_runs(folder, count):
    @bounded(count)
    @given(configs())
    def search(parts):
        names = ["max_model_len", "memory", *(field for given_fields in parts.values() for field in given_fields)]
        try:
            made = {name: PARTS[name](**given_fields) for name, given_fields in parts.items()}
            llm = LLM(config=Config(model=ModelConfig(path=str(folder)), **made))
        except FrameworkError as error:
            assert named(error, [*names, *parts]), error
            return
        with llm:
            run(llm, dummy=made.get("engine", EngineOptions()).load_format == "dummy")

    search()


def run(llm, dummy=False):
    """Two requests, or a refusal that says what is too small for them."""
    try:
        outputs = llm.generate([[4] * 5, [9]], GREEDY, use_tqdm=False)
    except FrameworkError as error:
        assert named(error, ["engine.max_model_len", "the pool has", "max_num_batched_tokens"]), error
    else:
        if not dummy and llm.engine.facts["max_model_len"] >= 9:
            assert [o.outputs[0].token_ids for o in outputs] == [[5, 6, 7, 8], [10, 11, 12, 13]]
    stats = llm.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1, stats


# ----------------------------------------------------------------------------------------------------------- words

KEYS = [
    *(f"engine.{field.name}" for field in fields(EngineOptions)),
    *(f"kv_cache.{field.name}" for field in fields(KVCacheConfig)),
    *(f"scheduler.{field.name}" for field in fields(SchedulerConfig)),
    *("model.path", "model.tokenizer", "model.revision", "sampler.top_p", "sampler.seed", "sampler.stop", "trace"),
    *("sampler.stages.top_p", "sampler.stages.top_p.order", "sampler.stages.gumbel.before", "sampler.logprobs_mode"),
    *("backend", "policy", "sampler", "sampler/stage", "kv_connector", "model", "executor", "grammar", "server.port"),
    *("prompt", "run", "bench", "hydra", "hydra.x", "engine", "sampler.stages", "engine.sed", "nope", "", "a.b", "@x"),
]
VALUES = [
    "0", "1", "-1", "3", "16", "64", "1.5", "1e99", "1e999", "nan", "inf", "true", "null", "", "x", "auto", "cpu",
    "off", "gumbel", "greedy", "priority", "[1]", "[a,b]", "{a:1}", "{}", "'q", '"q', "'q'", "${x}", "${engine.seed}",
    "${", "$x", "\\", "\u6f22", "a b", "a=b", "1,2", "range(3)", "99999999999999999999", "float32", "swap", "memory",
    "top_p", "\t",
]  # fmt: skip
word = st.one_of(
    st.builds(
        "{}{}={}".format, st.sampled_from(["", "", "", "+", "++"]), st.sampled_from(KEYS), st.sampled_from(VALUES)
    ),
    st.builds("{}{}".format, st.sampled_from(["", "+", "~", "--", "-"]), st.sampled_from(KEYS)),
    st.text(max_size=12),
)


@pytest.mark.parametrize("count", WORDS)
def test_any_words_compose_to_a_config_or_are_refused_by_name(count):
    @bounded(count)
    @given(st.lists(word, max_size=4))
    def search(words):
        try:
            config = compose(words)
        except FrameworkError as error:
            text = str(error)
            assert "\n" not in text and text.strip(), text
        else:
            assert isinstance(config, Config) and isinstance(config.sampler, SamplerConfig)

    search()


@pytest.mark.parametrize("words", [5, [5], [None], "backend=cpu", [["backend=cpu"]]])
def test_what_is_no_list_of_words_is_refused(words):
    with pytest.raises((ConfigError, TypeError), match=r"overrides? .*(word|string)"):
        LLM(overrides=words)
