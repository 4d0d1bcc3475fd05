"""What the oracle's cases lean on where KV blocks move: that blocks are swapped, and that loads fail.

And who may take what another engine has stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import LLM, SamplingParams

from .running import assert_nothing_left
from .settings import connector_words
from .tiny import NUM_TOKENS, Case

pytestmark = pytest.mark.usefixtures("fresh_store")


@pytest.fixture
def run(folders: dict[str, Path], oracle: Any) -> Any:
    """Runs the prompts of the oracle twice, compares tokens, and returns the counters of a drained engine."""

    def run(*words: str, params: SamplingParams | None = None, num_requests: int = 10) -> dict[str, Any]:
        wanted: list[Case] = oracle("llama")[:num_requests]
        params = params or SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        fixed = ["backend=cpu", "engine.dtype=float32", "kv_cache.block_size=8"]
        with LLM(model=str(folders["llama"]), overrides=[*fixed, *words]) as llm:
            for _ in range(2):
                outputs = llm.generate([{"prompt_token_ids": c.prompt} for c in wanted], params, use_tqdm=False)
                got = [o.outputs[0].token_ids for o in outputs]
                assert got == [c.tokens[: params.max_tokens] for c in wanted]
                assert_nothing_left(llm)
            stats = llm.engine.stats()
        return {**stats, "cached": [o.num_cached_tokens for o in outputs]}

    return run


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
