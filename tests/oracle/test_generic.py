"""`model=transformers` against transformers itself: equal greedy tokens and logprobs in every setting of the engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from framework import LLM

from ..models.generic_checkpoints import save
from .covering import covering
from .settings import FACTORS, case_id, words_of
from .test_against_transformers import MIN_GAP, check
from .tiny import NUM_REQUESTS, NUM_TOKENS, add_tokenizer, continuations, prompts

SEEDS = {"stablelm": 1, "cohere2": 1, "granite_moe": 1, "opt": 2}
NAMES = tuple(SEEDS)
"""A dense one, one with windows and full attention by turns, a mixture of experts, one with learned positions."""
WINDOWED = {"cohere2": 4}
"""KV groups of architectures with windows: three layers in four have one."""
PAIRS = covering(FACTORS)
WORD = "model=transformers"


@pytest.fixture(scope="module")
def generic_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: add_tokenizer(save(name, tmp_path_factory.mktemp(name), seed=seed)) for name, seed in SEEDS.items()}


@pytest.fixture(scope="module")
def generic_oracle(generic_folders: dict[str, Path]) -> Any:
    return cache(lambda name: continuations(generic_folders[name], prompts(NUM_REQUESTS), NUM_TOKENS))


def served(name: str) -> list[dict[str, Any]]:
    """Cases of the array; connectors do not go together with windows."""
    return [{**case, "connector": "none"} if name in WINDOWED else case for case in PAIRS]


def pool_words(name: str, case: dict[str, Any]) -> list[str]:
    """As many blocks for each KV group as the case gives to one."""
    blocks = next(int(word.rpartition("=")[2]) for word in words_of(case) if word.startswith("kv_cache.num_blocks="))
    return [f"kv_cache.num_blocks={1 + WINDOWED.get(name, 1) * (blocks - 1)}"]


def share(name: str) -> list[Any]:
    """Every architecture takes its part of the array, which is whole for all of them together."""
    place = NAMES.index(name)
    cases = enumerate(served(name)[place :: len(NAMES)])
    marks = ((), pytest.mark.full)  # every second one is enough where time counts
    return [pytest.param(name, case, id=f"{name}-{case_id(case)}", marks=marks[i % 2]) for i, case in cases]


@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_the_oracle_is_clear_of_ties(name: str, generic_oracle: Any) -> None:
    assert min(case.gap for case in generic_oracle(name)) > MIN_GAP


@pytest.mark.usefixtures("fresh_store")
@pytest.mark.parametrize(("name", "case"), [case for name in NAMES for case in share(name)])
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, case: dict[str, Any], generic_folders: dict[str, Path], generic_oracle: Any
) -> None:
    check(name, case, generic_folders, generic_oracle, WORD, *pool_words(name, case))


def test_the_ready_line_names_the_generic_path(
    generic_folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["backend=cpu", "engine.dtype=float32", "kv_cache.num_blocks=20", WORD]
    with caplog.at_level("INFO", logger="framework"), LLM(str(generic_folders["opt"]), overrides=words):
        pass
    assert "transformers (the generic path: code of transformers around our attention" in caplog.text
