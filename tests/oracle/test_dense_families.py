"""The dense families against transformers: equal greedy tokens, texts and logprobs in every setting of the engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from framework import LLM, SamplingParams

from .covering import covering
from .dense_families import FAMILIES, save
from .settings import FACTORS, case_id, words_of
from .test_against_transformers import MIN_GAP, check
from .tiny import NUM_TOKENS, continuations, prompts

NUM_GROUPS = {"gemma2": 2, "gemma3": 6, "mistral": 1, "phi3": 1, "qwen2": 2}
"""KV groups of families with windows; those of one family have one size."""
NUM_PROMPTS = 7
PAIRS = covering(FACTORS)
NUM_SHARES = 2 * len(FAMILIES)
"""Of the array: a family runs one of them by default, and all of it where there is time."""


@pytest.fixture(scope="module")
def dense_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def dense_oracle(dense_folders: dict[str, Path]) -> Any:
    return cache(lambda name: continuations(dense_folders[name], prompts(NUM_PROMPTS), NUM_TOKENS))


def cases_of(name: str) -> list[dict[str, Any]]:
    """Connectors do not go together with windows yet."""
    return [{**case, "connector": "none"} if name in NUM_GROUPS else case for case in PAIRS]


def pool_of(name: str, case: dict[str, Any]) -> str:
    """As many blocks for each KV group as the case gives to one."""
    blocks = next(int(word.rpartition("=")[2]) for word in words_of(case) if word.startswith("kv_cache.num_blocks="))
    return f"kv_cache.num_blocks={1 + NUM_GROUPS.get(name, 1) * (blocks - 1)}"


def all_cases() -> list[Any]:
    """(family, case), those of other shares marked."""
    return [
        pytest.param(
            name, case, id=f"{name}-{case_id(case)}", marks=[pytest.mark.full] if index % NUM_SHARES != place else []
        )
        for place, name in enumerate(FAMILIES)
        for index, case in enumerate(cases_of(name))
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_step_of_the_oracle_is_clear_of_ties_and_says_something(name: str, dense_oracle: Any) -> None:
    assert min(case.gap for case in dense_oracle(name)) > MIN_GAP
    assert len({token for case in dense_oracle(name) for token in case.tokens}) > 10


@pytest.mark.usefixtures("fresh_store")
@pytest.mark.parametrize(("name", "case"), all_cases())
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, case: dict[str, Any], dense_folders: dict[str, Path], dense_oracle: Any
) -> None:
    check(name, case, dense_folders, dense_oracle, pool_of(name, case))


@pytest.mark.parametrize("name", FAMILIES)
def test_bit_equal_products_give_the_same_logprobs_alone_and_among_others(
    name: str, dense_folders: dict[str, Path]
) -> None:
    words = ["backend=cpu", "engine.batch_invariant=true", "engine.dtype=bfloat16", "kv_cache.prefix_caching=false"]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    asked = [{"prompt_token_ids": p} for p in prompts(3)]
    with LLM(model=str(dense_folders[name]), overrides=[*words, "kv_cache.num_blocks=400"]) as llm:
        together = llm.generate(asked, params, use_tqdm=False)
        for prompt, among in zip(asked, together, strict=True):
            alone = llm.generate([prompt], params, use_tqdm=False)[0]
            assert alone.outputs[0].logprobs == among.outputs[0].logprobs
