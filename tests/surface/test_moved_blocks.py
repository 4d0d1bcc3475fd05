"""What a user says of KV that moves: `scheduler.preemption`, `kv_cache.num_swap_blocks`, the group `kv_connector`."""

import logging
import subprocess
import sys

import pytest

from framework import LLM, SamplingParams
from framework.config import compose
from framework.errors import ConfigError, KVMemoryError, PluginError
from framework_connectors.block_store import drop_store

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.block_size=4")
CROWDED = (*SMALL, "kv_cache.num_blocks=9", "kv_cache.prefix_caching=false")
PROMPTS = [[4, 5, 6, 7, 8, 9, 10, 11], [14, 15, 16, 17, 18, 19, 20, 21]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def store():
    drop_store("surface")
    yield ("kv_connector=memory", "kv_connector.store=surface")
    drop_store("surface")


def run(folder, *words, prompts=PROMPTS, params=GREEDY):
    """(tokens, counters, facts)"""
    with LLM(folder, overrides=words) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"] - 1
        return [o.outputs[0].token_ids for o in outputs], stats, dict(llm.engine.facts)


def test_preempted_request_is_swapped_out_and_in_and_draws_the_same_tokens(folders):
    recomputed, stats, facts = run(folders["mixed"], *CROWDED)
    assert stats["num_preemptions"] > 0 and stats["num_swap_outs"] == 0
    assert (facts["preemption"], facts["num_swap_blocks"]) == ("recompute", 0)
    swapped, moved, facts = run(folders["mixed"], *CROWDED, "scheduler.preemption=swap")
    assert swapped == recomputed and moved["num_swap_outs"] == moved["num_preemptions"]
    assert moved["prefill_tokens"] < stats["prefill_tokens"], "swapped blocks are not computed again"
    assert (facts["preemption"], facts["num_swap_blocks"]) == ("swap", 8), "as many as the pool"


def test_explain_says_how_much_is_swapped_and_what_happens_when_it_is_full(folders):
    command = [sys.executable, "-m", "framework", "explain", f"model.path={folders['mixed']}", *CROWDED]
    words = ["scheduler.preemption=swap", "run.build=true"]
    shown = subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines() if "finds no room there is computed again" in line]
    assert [row[:2] for row in rows] == [["kv_cache.num_swap_blocks", "?"], ["kv_cache.num_swap_blocks", "8"]]


def test_full_swap_space_recomputes_and_is_counted(folders):
    tokens, stats, _ = run(folders["mixed"], *CROWDED, "scheduler.preemption=swap", "kv_cache.num_swap_blocks=1")
    assert stats["num_swap_fallbacks"] > 0 and stats["num_swap_outs"] == 0
    assert tokens == run(folders["mixed"], *CROWDED)[0]


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_tokens_of_the_connector_count_as_cached(folders, store, asynchronous):
    words = (*SMALL, *store, f"kv_connector.async_loads={asynchronous}")
    first = run(folders["mixed"], *words)
    assert first[1]["connector_hit_tokens"] == 0 and first[2]["kv_connector"] == "memory"
    with LLM(folders["mixed"], overrides=words) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [o.num_cached_tokens for o in outputs] == [4, 4], "a full hit gives up its last block"
        assert [o.outputs[0].token_ids for o in outputs] == first[0]
        assert llm.engine.stats()["prefill_tokens"] == 8


def test_salts_keep_the_store_apart(folders, store):
    salted = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in ("a", "b")]
    run(folders["mixed"], *SMALL, *store, prompts=salted[0])
    assert run(folders["mixed"], *SMALL, *store, prompts=salted[1])[1]["connector_hit_tokens"] == 0
    assert run(folders["mixed"], *SMALL, *store, prompts=salted[0])[1]["connector_hit_tokens"] == 4


def test_store_drops_what_was_used_least_recently(folders, store):
    words = (*SMALL, *store, "kv_connector.capacity_bytes=4000")  # a block takes 1024 bytes
    run(folders["mixed"], *words, prompts=PROMPTS[0])
    run(folders["mixed"], *words, prompts=PROMPTS[1])
    assert run(folders["mixed"], *words, prompts=PROMPTS[0])[1]["connector_hit_tokens"] == 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("kv_cache.num_swap_blocks=4", r"kv_cache.num_swap_blocks=4 needs scheduler.preemption=swap"),
        ("scheduler.preemption=swp", "scheduler.preemption=swp: there is no such choice. Did you mean 'swap'"),
        ("kv_connector=memry", "kv_connector=memry: there is no such choice. Did you mean 'memory'"),
        ("kv_connector.store=x", r"store: there is no such key. It is an option of kv_connector=memory: choose"),
    ],
)
def test_wrong_word_is_refused_by_key(word, message):
    with pytest.raises(ConfigError, match=message):
        compose([word])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["capacity_bytes=0"], "kv_connector.capacity_bytes=0 is too small. Use 1 or more"),
        (["capacity_bytes=100"], "kv_connector.capacity_bytes=100 holds no block: one takes 1024"),
        (["store=''"], "kv_connector.store must not be empty"),
        (["capacity_byte=1"], "capacity_byte: there is no such key. Did you mean 'capacity_bytes'"),
        (["async_loads=maybe"], "async_loads"),
    ],
)
def test_wrong_option_of_the_connector_is_refused_by_key(folders, words, message):
    with pytest.raises((ConfigError, PluginError), match=message):
        LLM(folders["mixed"], overrides=[*SMALL, "kv_connector=memory", *(f"kv_connector.{w}" for w in words)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inner=memry"], "kv_connector.inner=memry: no installed plugin provides it. Did you mean 'memory'"),
        (["inner_options.stor=x"], "kv_connector.inner_options.stor: there is no such key. Did you mean 'store'"),
        (["inner_options.store=''"], "kv_connector.store must not be empty"),
        (["inner=faulty"], "kv_connector.inner=faulty has nothing to fail"),
    ],
)
def test_wrong_connector_within_a_connector_is_refused_by_its_own_key(folders, words, message):
    with pytest.raises((ConfigError, PluginError), match=message):
        LLM(folders["mixed"], overrides=[*SMALL, "kv_connector=faulty", *(f"kv_connector.{w}" for w in words)])


def test_engines_that_want_the_store_in_two_sizes_are_told(folders, store):
    with LLM(folders["mixed"], overrides=[*SMALL, *store]), pytest.raises(ConfigError, match=r"holds 1073741824\. Use"):
        LLM(folders["mixed"], overrides=[*SMALL, *store, "kv_connector.capacity_bytes=5000"])


@pytest.mark.parametrize("ahead", ["false", "true"])
@pytest.mark.parametrize("method", ["matched_tokens", "after_alloc", "build_meta", "start_load", "wait_saves",
                                    "finished", "failed_blocks", "request_finished", "request_preempted"])  # fmt: skip
def test_connector_that_raises_is_named_and_left_alone(folders, store, monkeypatch, caplog, method, ahead):
    words = (*CROWDED, *store, f"engine.async_scheduling={ahead}")
    expected = run(folders["mixed"], *words)[0]

    def broken(*args):
        raise OSError("the network is gone")

    monkeypatch.setattr(f"framework_connectors.memory.MemoryConnector.{method}", broken)
    with caplog.at_level(logging.ERROR):
        assert run(folders["mixed"], *words)[0] == expected
    assert f"kv_connector 'memory' of framework 0.1.0 raised in {method}; the engine goes on without it" in caplog.text
    assert "the network is gone" in caplog.text and caplog.text.count("raised in") == 1


@pytest.mark.parametrize("ahead", ["false", "true"])
def test_connector_that_cannot_be_closed_while_it_loads_stops_the_engine(folders, store, monkeypatch, ahead):
    words = (*SMALL, *store, "kv_connector.async_loads=true", f"engine.async_scheduling={ahead}")
    run(folders["mixed"], *words)

    def broken(*args):
        raise OSError("the network is gone")

    for method in ("start_load", "close"):
        monkeypatch.setattr(f"framework_connectors.memory.MemoryConnector.{method}", broken)
    with LLM(folders["mixed"], overrides=list(words)) as llm:
        with pytest.raises(KVMemoryError, match=r"^kv_connector 'memory' of .* raised OSError.* Close the engine"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="this engine stopped when a step failed"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_connector_is_listed_with_its_options():
    command = [sys.executable, "-m", "framework", "kv_connector=memory", "--cfg", "job"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "  capacity_bytes: 1073741824\n  async_loads: false\n" in shown
