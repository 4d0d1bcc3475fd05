"""`LLM.reconfigure`: another engine on the same weights, or the old one where the new one cannot be."""

from dataclasses import replace

import pytest
import torch

from framework import LLM, SamplingParams
from framework.errors import CheckpointError, ConfigError
from framework.testing.crafted import save_crafted

WORDS = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=17")
GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture
def llm(folder):
    with LLM(folder, overrides=WORDS) as made:
        yield made


def tokens(llm, params=GREEDY):
    return llm.generate([4], params, use_tqdm=False)[0].outputs[0].token_ids


def model_of(llm):
    return llm.engine.loaded.model


@pytest.mark.parametrize(
    "words",
    [
        ["sampler=greedy"], ["policy=priority"], ["scheduler.max_num_seqs=2"], ["kv_cache.num_blocks=9"],
        ["kv_cache.block_size=8"], ["engine.async_scheduling=true"], ["engine.seed=5"], ["sampler.max_tokens=2"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_weights_stay_while_their_keys_are_unchanged(llm, words):
    before, engine = model_of(llm), llm.engine
    llm.reconfigure(words)
    assert model_of(llm) is before and llm.engine is not engine
    assert tokens(llm) == [5, 6, 7]


@pytest.mark.parametrize(
    "words", [["engine.dtype=bfloat16"], ["engine.max_model_len=32"], ["engine.batch_invariant=true"]]
)
def test_weights_are_loaded_again_when_one_of_their_keys_changes(llm, words):
    before = model_of(llm)
    llm.reconfigure(words)
    assert model_of(llm) is not before
    assert tokens(llm) == [5, 6, 7]


def test_words_come_behind_those_of_before(llm):
    llm.reconfigure(["scheduler.max_num_seqs=3", "sampler.max_tokens=2"])
    llm.reconfigure(["sampler.max_tokens=5"])
    config = llm.engine.config
    assert (config.scheduler.max_num_seqs, config.engine.max_model_len) == (3, 64)
    assert len(tokens(llm, None)) == 5


def test_nothing_is_rebuilt_when_nothing_changes(llm):
    engine = llm.engine
    llm.reconfigure(["engine.dtype=float32"])
    llm.reconfigure([])
    assert llm.engine is engine


def test_another_model_takes_the_place_of_the_first(llm, tmp_path):
    table = torch.zeros(20, 20)
    table[torch.arange(20), (torch.arange(20) + 2) % 20] = 8.0
    other = save_crafted(tmp_path / "by_two", table)
    llm.reconfigure([f"model.path={other}"])
    assert tokens(llm) == [6, 8, 10]
    llm.reconfigure(["sampler=greedy"])
    assert tokens(llm) == [6, 8, 10]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["kv_cache.num_blocks=1"], ConfigError, r"kv_cache\.num_blocks=1 is too small"),
        (["sampler=gredy"], ConfigError, "Did you mean 'greedy'"),
        (["model.path=/nowhere"], CheckpointError, "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_and_the_engine_stays(llm, words, error, message):
    engine = llm.engine
    with pytest.raises(error, match=message):
        llm.reconfigure(words)
    assert llm.engine is engine
    assert tokens(llm) == [5, 6, 7]
    llm.reconfigure(["sampler.max_tokens=2"])  # the refused words are forgotten
    assert len(tokens(llm, None)) == 2


@pytest.mark.parametrize("word", ["sampler=greedy", "engine.max_model_len=32"])
def test_old_engine_comes_back_when_the_new_one_fails_to_be_built(llm, monkeypatch, word):
    import framework.engine.build as build

    calls, allocate = [], build._allocate

    def failing(*args):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no room")
        return allocate(*args)

    monkeypatch.setattr(build, "_allocate", failing)
    with pytest.raises(MemoryError):
        llm.reconfigure([word])
    assert (llm.engine.config.sampler.name, llm.engine.config.engine.max_model_len) == ("gumbel", 64)
    assert tokens(llm) == [5, 6, 7]


def test_running_requests_are_left_alone(llm):
    llm.engine.add_request("a", [4], GREEDY)
    with pytest.raises(RuntimeError, match="reconfigure: requests are running; wait for them, or abort them first"):
        llm.reconfigure(["sampler=greedy"])
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_llm_of_a_config_takes_a_config(llm):
    with LLM(config=llm.engine.config) as other:
        with pytest.raises(ValueError, match=r"made from a config.*pass config="):
            other.reconfigure(["sampler=greedy"])
        before, config = model_of(other), other.engine.config
        other.reconfigure(config=replace(config, scheduler=replace(config.scheduler, max_num_seqs=2)))
        assert model_of(other) is before and other.engine.config.scheduler.max_num_seqs == 2
    with pytest.raises(TypeError, match="overrides must be a list of words"):
        llm.reconfigure("sampler=greedy")
    with pytest.raises(ValueError, match="pass config alone"):
        llm.reconfigure(["sampler=greedy"], config=llm.engine.config)


def test_words_of_an_iterator_are_those_of_before_too(folder):
    with LLM(folder, overrides=iter(WORDS)) as made:
        made.reconfigure(["scheduler.max_num_seqs=3"])
        assert made.engine.config.engine.max_model_len == 64
