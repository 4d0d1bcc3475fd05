"""A replay is built from the recorded configuration, and a word changes its own key alone."""

from dataclasses import replace

import pytest

from framework.config import GUMBEL_STAGES, Config, EngineOptions, SamplerConfig, StageConfig
from framework.engine.recording import RecordedRequest, Recording
from framework.request import SamplingParams
from framework.rng import child_seed
from framework.runs.replay_config import changed_request, replay_config

FACTS = {"max_model_len": 64, "max_num_batched_tokens": 32, "num_blocks": 9, "block_size": 4, "num_swap_blocks": 0}
MINE = StageConfig("mine", "mine")
RECORDED = Config(
    engine=EngineOptions(dtype="float32", seed=1, async_scheduling=True),
    sampler=SamplerConfig("full", (GUMBEL_STAGES[0], MINE, *GUMBEL_STAGES[1:])),
)
RECORDING = Recording("t.jsonl", FACTS, RECORDED, [])


def made(now=None, *words):
    typed = {word.partition("=")[0]: word for word in words}
    return replay_config(RECORDING, now or Config(), typed, Config)


def keys(config):
    return [stage.key for stage in config.sampler.stages]


def without(name, stages=GUMBEL_STAGES):
    return tuple(stage for stage in stages if stage.key != name)


def test_recorded_configuration_has_the_numbers_of_its_machine():
    config = made()
    assert (config.engine.dtype, config.engine.max_model_len, config.scheduler.max_num_batched_tokens) == (
        "float32", 64, 32,
    )  # fmt: skip
    assert (config.kv_cache.num_blocks, config.kv_cache.block_size, config.trace) == (9, 4, None)
    assert config.sampler == RECORDED.sampler


def test_word_changes_its_key_and_leaves_what_else_stands_here():
    now = Config(engine=EngineOptions(dtype="bfloat16", seed=2))
    config = made(now, "engine.seed=2")
    assert (config.engine.seed, config.engine.dtype) == (2, "float32")


@pytest.mark.parametrize(
    ("word", "stages", "expected"),
    [
        ("sampler.stages.top_k", without("top_k"), [key for key in keys(RECORDED) if key != "top_k"]),
        ("sampler/stage=new", (*GUMBEL_STAGES[:-1], StageConfig("new", "new"), GUMBEL_STAGES[-1]),
         [*keys(RECORDED)[:-1], "new", "gumbel"]),
        ("sampler=greedy", (StageConfig("greedy", "greedy"),), ["greedy"]),
    ],
)  # fmt: skip
def test_word_of_a_stage_changes_the_recorded_pipeline(word, stages, expected):
    config = made(Config(sampler=SamplerConfig("greedy", stages)), word)
    assert keys(config) == expected
    assert config.sampler.name == ("greedy" if word == "sampler=greedy" else "full")


def test_option_of_a_stage_is_changed_in_its_place():
    other = tuple(replace(s, options={"k": 3}) if s.key == "top_k" else s for s in GUMBEL_STAGES)
    config = made(Config(sampler=SamplerConfig("gumbel", other)), "sampler.stages.top_k.k=3")
    assert keys(config) == keys(RECORDED)
    assert next(s for s in config.sampler.stages if s.key == "top_k").options == {"k": 3}


def test_words_give_requests_their_parameters_and_seeds():
    own = RecordedRequest("0", [4], SamplingParams(seed=5, top_k=3), 5, 0, frozenset())
    drawn = RecordedRequest("1", [4], SamplingParams(), child_seed(1, 2), 1, frozenset())
    second = replace(drawn, request_id="1\x1f1", seed=child_seed(drawn.seed, 1), sample_index=1)

    def seeds(config, *words):
        changed = changed_request(RECORDING, config, {word.partition("=")[0]: word for word in words})
        return [changed(one).seed for one in (own, drawn, second)]

    assert seeds(RECORDED) == [5, drawn.seed, second.seed]
    other = replace(RECORDED, engine=replace(RECORDED.engine, seed=2))
    assert seeds(other, "engine.seed=2") == [5, child_seed(2, 2), child_seed(child_seed(2, 2), 1)]
    all_alike = replace(RECORDED, sampler=replace(RECORDED.sampler, params={"seed": -1}))
    assert seeds(all_alike, "sampler.seed=-1") == [2**64 - 1, 2**64 - 1, child_seed(2**64 - 1, 1)]
    cold = replace(RECORDED, sampler=replace(RECORDED.sampler, params={"temperature": 0.1}))
    params = changed_request(RECORDING, cold, {"sampler.temperature": "sampler.temperature=0.1"})(own).params
    assert (params.temperature, params.top_k, params.seed) == (0.1, 3, 5)
