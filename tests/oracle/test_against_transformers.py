"""The engine against transformers on tiny random models: equal greedy tokens and logprobs in every setting."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import LLM, SamplingParams

from .covering import pairwise
from .tiny import NUM_REQUESTS, NUM_TOKENS, SAVE, VOCAB, Case, prompts

MIN_GAP = 1e-3  # float32 rounding moves logits by about 1e-5; a wider gap than this cannot be turned by it
TOLERANCE = 1e-4

FACTORS: dict[str, list[Any]] = {
    "chunk": [1, 7, 64, 4096],
    "block_size": [8, 16, 32],
    "concurrent": [1, 3, 7, 16],
    "pool": ["roomy", "tight"],
    "cache": ["off", "cold", "warm"],
    "steps": ["sync", "async"],
}
PAIRS = pairwise(FACTORS)
WHOLE = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]


def case_id(case: dict[str, Any]) -> str:
    return "-".join(str(v) for v in case.values())


def make_llm(folder: Path, case: dict[str, Any], *words: str) -> LLM:
    """An engine with the case's limits. A tight pool holds the longest request and a third of another one."""
    longest = max(len(p) for p in prompts(NUM_REQUESTS)) + NUM_TOKENS
    blocks = -(-longest // case["block_size"])
    pool = 2000 if case["pool"] == "roomy" else 1 + blocks + -(-blocks // 3)
    return LLM(
        model=str(folder),
        overrides=[
            "backend=cpu",
            "engine.dtype=float32",
            f"scheduler.max_num_batched_tokens={case['chunk']}",
            f"scheduler.max_num_seqs={case['concurrent']}",
            f"kv_cache.block_size={case['block_size']}",
            f"kv_cache.num_blocks={pool}",
            f"kv_cache.prefix_caching={str(case['cache'] != 'off').lower()}",
            f"engine.async_scheduling={str(case['steps'] == 'async').lower()}",
            *words,
        ],
    )


def generate(llm: LLM, case: dict[str, Any], wanted: list[Case], params: Any) -> list[Any]:
    """The outputs of the case's last pass; a warm case has had one pass before."""
    given = [{"prompt_token_ids": c.prompt} for c in wanted]
    for _ in range(2 if case["cache"] == "warm" else 1):
        outputs = llm.generate(given, params, use_tqdm=False)
    return outputs


def check(name: str, case: dict[str, Any], folders: dict[str, Path], oracle: Any) -> None:
    wanted: list[Case] = oracle(name)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=VOCAB)
    with make_llm(folders[name], case) as llm:
        outputs = generate(llm, case, wanted, params)
        stats = llm.engine.stats()
    for want, output in zip(wanted, outputs, strict=True):
        got = output.outputs[0]
        assert got.token_ids == want.tokens
        rows = torch.tensor([[entry[i].logprob for i in range(VOCAB)] for entry in got.logprobs])
        assert (rows - want.logprobs).abs().max() < TOLERANCE
        assert [entry[t].rank for entry, t in zip(got.logprobs, got.token_ids, strict=True)] == [1] * NUM_TOKENS
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1  # all but the null block
    if case["cache"] == "warm" and case["pool"] == "roomy":
        assert outputs[0].num_cached_tokens > 0


@pytest.mark.parametrize("name", SAVE)
def test_every_step_of_the_oracle_is_clear_of_ties(name: str, oracle: Any) -> None:
    assert min(case.gap for case in oracle(name)) > MIN_GAP


@pytest.mark.parametrize("case", PAIRS, ids=case_id)
@pytest.mark.parametrize("name", SAVE)
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, case: dict[str, Any], folders: dict[str, Path], oracle: Any
) -> None:
    check(name, case, folders, oracle)


@pytest.mark.full
@pytest.mark.parametrize("case", WHOLE, ids=case_id)
@pytest.mark.parametrize("name", SAVE)
def test_greedy_tokens_and_logprobs_equal_transformers_over_the_whole_product(
    name: str, case: dict[str, Any], folders: dict[str, Path], oracle: Any
) -> None:
    check(name, case, folders, oracle)


def test_the_covering_array_is_small_and_covers_every_pair() -> None:
    assert len(PAIRS) <= 40
    for a, b in product(FACTORS, FACTORS):
        if a < b:
            assert {(c[a], c[b]) for c in PAIRS} == set(product(FACTORS[a], FACTORS[b]))


def test_tight_pools_of_the_array_do_preempt(folders: dict[str, Path], oracle: Any) -> None:
    case = {"chunk": 64, "block_size": 8, "concurrent": 16, "pool": "tight", "cache": "off", "steps": "async"}
    with make_llm(folders["llama"], case) as llm:
        generate(llm, case, oracle("llama"), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
        assert llm.engine.stats()["num_preemptions"] > 0


# --------------------------------------------------------------------------------------- seeded sampling, bit for bit


def sampled(folder: Path, case: dict[str, Any], wanted: list[Case], dtype: str) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=1000 + i, max_tokens=NUM_TOKENS)
        for i in range(len(wanted))
    ]
    words = ["engine.batch_invariant=true", f"engine.dtype={dtype}"]
    with make_llm(folder, case, *words) as llm:
        return [o.outputs[0].token_ids for o in generate(llm, case, wanted, params)]


BASE = {"chunk": 4096, "block_size": 16, "concurrent": 1, "pool": "roomy", "cache": "off", "steps": "sync"}


@pytest.fixture(scope="session")
def alone(folders: dict[str, Path], oracle: Any) -> Any:
    """Tokens of each request when it runs alone, in one chunk, without a cache."""
    return cache(lambda name, dtype: sampled(folders[name], BASE, oracle(name), dtype))


@pytest.mark.parametrize("case", PAIRS, ids=case_id)
@pytest.mark.parametrize("name", SAVE)
def test_seeded_tokens_are_the_same_in_every_setting(
    name: str, case: dict[str, Any], folders: dict[str, Path], oracle: Any, alone: Any
) -> None:
    # Half of the cases a dtype: each pair of factors stays covered for one of them, and the suite stays short.
    dtype = ("float32", "bfloat16")[PAIRS.index(case) % 2]
    assert sampled(folders[name], case, oracle(name), dtype) == alone(name, dtype)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", WHOLE, ids=case_id)
@pytest.mark.parametrize("name", SAVE)
def test_seeded_tokens_are_the_same_over_the_whole_product(
    name: str, case: dict[str, Any], dtype: str, folders: dict[str, Path], oracle: Any, alone: Any
) -> None:
    assert sampled(folders[name], case, oracle(name), dtype) == alone(name, dtype)


def test_another_seed_gives_other_tokens(folders: dict[str, Path], oracle: Any) -> None:
    prompt = {"prompt_token_ids": oracle("llama")[0].prompt}
    with make_llm(folders["llama"], BASE) as llm:
        params = [SamplingParams(temperature=1.0, seed=s, max_tokens=NUM_TOKENS) for s in range(8)]
        outputs = llm.generate([prompt] * 8, params, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 8
