"""Latent attention in the engine against transformers: equal greedy tokens and logprobs in every setting."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from framework import LLM

from .covering import covering
from .latent_families import FAMILIES, SIZES, save
from .settings import FACTORS, case_id
from .test_against_transformers import MIN_GAP, check
from .tiny import NUM_REQUESTS, NUM_TOKENS, continuations, prompts

NAMES = tuple(FAMILIES)
PAIRS = covering(FACTORS)


@pytest.fixture(scope="module")
def latent_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def latent_oracle(latent_folders: dict[str, Path]) -> Any:
    return cache(lambda name: continuations(latent_folders[name], prompts(NUM_REQUESTS), NUM_TOKENS))


def share(name: str) -> list[Any]:
    """Each family takes half of the array, which is whole for both together, and of that every second case where time
    counts."""
    cases = enumerate(PAIRS[NAMES.index(name) :: len(NAMES)])
    marks = ((), pytest.mark.full)
    return [pytest.param(name, case, id=f"{name}-{case_id(case)}", marks=marks[i % 2]) for i, case in cases]


@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_the_oracle_is_clear_of_ties(name: str, latent_oracle: Any) -> None:
    assert min(case.gap for case in latent_oracle(name)) > MIN_GAP


@pytest.mark.usefixtures("fresh_store")
@pytest.mark.parametrize(("name", "case"), [one for name in NAMES for one in share(name)])
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, case: dict[str, Any], latent_folders: dict[str, Path], latent_oracle: Any
) -> None:
    check(name, case, latent_folders, latent_oracle)


@pytest.mark.parametrize("name", NAMES)
def test_attention_that_serves_latents_is_chosen_and_keeps_one_a_token(
    name: str, latent_folders: dict[str, Path]
) -> None:
    with LLM(model=str(latent_folders[name]), overrides=["backend=cpu", "engine.dtype=float32"]) as llm:
        facts = llm.engine.facts
    kept = SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"]
    assert (facts["model"], facts["attention"]) == (name, "mla_torch")
    assert facts["kv_bytes"] == facts["num_blocks"] * facts["block_size"] * SIZES["num_hidden_layers"] * kept * 4
