"""Seeded sampling, bit for bit: the same tokens as alone, in one chunk, a step at a time and without a cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from framework import SamplingParams
from framework.rng import child_seed

from .covering import covering
from .running import run_case
from .settings import BASE, FACTORS, case_id, num_completions, num_requests
from .tiny import NUM_TOKENS, PIECES, SAVE, ending

PAIRS = covering(FACTORS)
DTYPES = ("float32", "bfloat16")
SPREAD: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "max_tokens": NUM_TOKENS}
NUM_PROMPTS = 8  # bit-equal products cost more than others


def words_for(dtype: str) -> list[str]:
    return ["engine.batch_invariant=true", f"engine.dtype={dtype}"]


@pytest.fixture(scope="session")
def alone(folders: dict[str, Path], oracle: Any) -> Any:
    """Tokens of completion i of each request, when it runs by itself with the seed of a child."""

    def run(name: str, dtype: str) -> list[list[list[int]]]:
        prompts = [want.prompt for want in oracle(name)[:NUM_PROMPTS]]
        seeds = [[child_seed(1000 + index, i) for i in range(3)] for index in range(len(prompts))]
        params = [SamplingParams(seed=seed, **SPREAD) for each in seeds for seed in each]
        outputs, _ = run_case(folders[name], BASE, [p for p in prompts for _ in range(3)], params, *words_for(dtype))
        tokens = [o.outputs[0].token_ids for o in outputs]
        return [tokens[i : i + 3] for i in range(0, len(tokens), 3)]

    return cache(run)


def stops_of(case: dict[str, Any], index: int, tokens: list[int]) -> list[str]:
    """A stop string that the tokens bring, for two requests in three."""
    if case["stop"] == "off" or index % 3 == 0:
        return []
    return ["".join(PIECES[t] for t in tokens)[20:24]]


def check(name: str, dtype: str, case: dict[str, Any], folders: dict[str, Path], oracle: Any, alone: Any) -> None:
    wanted = alone(name, dtype)[: num_requests(case)]
    prompts = [want.prompt for want in oracle(name)][: len(wanted)]
    params = [
        SamplingParams(
            seed=1000 + index,
            n=num_completions(case, index),
            stop=stops_of(case, index, tokens[0]),
            prompt_logprobs=1 if case["prompt_logprobs"] == "on" and index % 4 else None,
            **SPREAD,
        )
        for index, tokens in enumerate(wanted)
    ]
    outputs, _ = run_case(folders[name], case, prompts, params, *words_for(dtype))
    for output, tokens, asked in zip(outputs, wanted, params, strict=True):
        expected = [ending(tokens[i], asked.stop or (), False) for i in range(asked.n)]
        assert [(c.token_ids, c.text, c.stop_reason) for c in output.outputs] == expected


@pytest.mark.usefixtures("fresh_store")
@pytest.mark.parametrize("index", range(len(PAIRS)), ids=lambda index: case_id(PAIRS[index]))
def test_seeded_tokens_are_the_same_in_every_setting(
    index: int, folders: dict[str, Path], oracle: Any, alone: Any
) -> None:
    # A quarter of the cases for each model and dtype: over all of them every pair is covered, and the suite is short.
    name, dtype = list(SAVE)[index % 2], DTYPES[index // 2 % 2]
    check(name, dtype, PAIRS[index], folders, oracle, alone)


@pytest.mark.full
@pytest.mark.usefixtures("fresh_store")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PAIRS, ids=case_id)
@pytest.mark.parametrize("name", SAVE)
def test_seeded_tokens_are_the_same_for_each_model_and_dtype(
    name: str, case: dict[str, Any], dtype: str, folders: dict[str, Path], oracle: Any, alone: Any
) -> None:
    check(name, dtype, case, folders, oracle, alone)


def test_another_seed_gives_other_tokens(folders: dict[str, Path], oracle: Any) -> None:
    prompt = oracle("llama")[0].prompt
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=NUM_TOKENS) for s in range(8)]
    outputs, _ = run_case(folders["llama"], BASE, [prompt] * 8, params)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 8
