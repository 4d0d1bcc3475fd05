"""The engine against transformers while KV blocks move: swapped out and in, stored, loaded, late, failed, dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import LLM, SamplingParams
from framework_connectors.block_store import drop_store

from .covering import pairwise
from .tiny import NUM_TOKENS, Case

FAULTS = {
    "late": ["late_saves=3"],
    "failed": ["failed_loads=0.6"],
    "dropped": ["dropped_loads=0.3", "dropped_saves=0.3"],
    "reordered": ["reorder=true"],
    "everything": ["late_saves=2", "failed_loads=0.3", "dropped_loads=0.2", "dropped_saves=0.2", "reorder=true"],
}
FACTORS: dict[str, list[Any]] = {
    "connector": ["none", "memory", "small", *FAULTS],
    "loads": ["within", "beside"],
    "preemption": ["recompute", "swap", "little"],
    "ahead": ["false", "true"],
    "pool": ["roomy", "tight"],
    "chunk": [7, 64],
    "concurrent": [3, 16],
    "cache": ["true", "false"],
}
PAIRS = pairwise(FACTORS)


def words_of(case: dict[str, Any]) -> list[str]:
    """Words of a case; the tight pool holds the longest request, 12 blocks of 8, and a third of another one."""
    words = [
        f"engine.async_scheduling={case['ahead']}",
        f"scheduler.max_num_batched_tokens={case['chunk']}",
        f"scheduler.max_num_seqs={case['concurrent']}",
        f"scheduler.preemption={'recompute' if case['preemption'] == 'recompute' else 'swap'}",
        f"kv_cache.num_blocks={400 if case['pool'] == 'roomy' else 17}",
        f"kv_cache.prefix_caching={case['cache']}",
    ]
    if case["preemption"] == "little":
        words.append("kv_cache.num_swap_blocks=2")
    return words + connector_words(case["connector"], case["loads"] == "beside")


def connector_words(name: str, is_async: bool) -> list[str]:
    if name == "none":
        return []
    capacity = 200_000 if name == "small" else 1 << 30  # 200 kB: 16 blocks
    options = {"store": "oracle", "capacity_bytes": capacity, "async_loads": str(is_async).lower()}
    if name in FAULTS:
        inner = ",".join(f"{key}:{value}" for key, value in options.items())
        faults = [f"kv_connector.{word}" for word in FAULTS[name]]
        return ["kv_connector=faulty", f"kv_connector.inner_options={{{inner}}}", *faults]
    return ["kv_connector=memory", *(f"kv_connector.{key}={value}" for key, value in options.items())]


@pytest.fixture
def run(folders: dict[str, Path], oracle: Any) -> Any:
    """Runs the prompts of the oracle twice, compares tokens, and returns the counters of a drained engine."""
    drop_store("oracle")

    def run(*words: str, params: SamplingParams | None = None, num_requests: int = 10) -> dict[str, Any]:
        wanted: list[Case] = oracle("llama")[:num_requests]
        params = params or SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        fixed = ["backend=cpu", "engine.dtype=float32", "kv_cache.block_size=8"]
        with LLM(model=str(folders["llama"]), overrides=[*fixed, *words]) as llm:
            for _ in range(2):
                outputs = llm.generate([{"prompt_token_ids": c.prompt} for c in wanted], params, use_tqdm=False)
                got = [o.outputs[0].token_ids for o in outputs]
                assert got == [c.tokens[: params.max_tokens] for c in wanted]
                stats = llm.engine.stats()
                assert stats["num_free_blocks"] == stats["num_blocks"] - 1  # all but the null block
                assert stats["num_free_swap_blocks"] == stats["num_swap_blocks"]
                assert stats["num_running"] == stats["num_waiting"] == 0
        return {**stats, "cached": [o.num_cached_tokens for o in outputs]}

    yield run
    drop_store("oracle")


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, case.values())))
def test_tokens_are_those_of_transformers_however_blocks_move(run: Any, case: dict[str, Any]) -> None:
    run(*words_of(case))


def test_cases_with_little_memory_do_swap_and_fall_back(run: Any) -> None:
    tight = ["kv_cache.num_blocks=17", "scheduler.preemption=swap"]
    roomy = run(*tight)
    assert roomy["num_swap_outs"] == roomy["num_preemptions"] > 0 and roomy["num_swap_fallbacks"] == 0
    little = run(*tight, "kv_cache.num_swap_blocks=2")
    assert little["num_swap_fallbacks"] > 0 and little["num_swap_blocks"] == 2


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", ["failed", "dropped", "everything"])
def test_faults_of_the_cases_do_fail_loads(run: Any, name: str, is_async: bool) -> None:
    stats = run("kv_cache.num_blocks=400", "kv_cache.prefix_caching=false", *connector_words(name, is_async))
    assert stats["num_failed_loads"] > 0


def test_decode_engine_computes_the_tail_of_what_a_prefill_engine_has_handed_over(run: Any, oracle: Any) -> None:
    connector = connector_words("memory", is_async=False)
    run(*connector, params=SamplingParams(temperature=0.0, max_tokens=1))
    stats = run(*connector, "kv_cache.prefix_caching=false")
    whole = [(len(c.prompt) - 1) // 8 * 8 for c in oracle("llama")[:10]]
    assert stats["cached"] == whole
    assert stats["prefill_tokens"] == 2 * sum(
        len(c.prompt) - n for c, n in zip(oracle("llama")[:10], whole, strict=True)
    )


@pytest.mark.parametrize("changed", ["engine.dtype=bfloat16", "engine.batch_invariant=true", "kv_cache.block_size=16"])
def test_engine_whose_kv_is_another_takes_nothing(run: Any, folders: Any, oracle: Any, changed: str) -> None:
    connector = connector_words("memory", is_async=False)
    run(*connector)
    words = ["engine.dtype=float32", "kv_cache.block_size=8", *connector, changed]
    with LLM(model=str(folders["llama"]), overrides=words) as llm:
        llm.generate([{"prompt_token_ids": c.prompt} for c in oracle("llama")[:3]], use_tqdm=False)
        assert llm.engine.stats()["connector_hit_tokens"] == 0
