"""Mixtures of experts in the engine against transformers: equal greedy tokens and logprobs in every setting, and counts
of experts that are those of its routers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from framework import LLM, SamplingParams

from .covering import covering
from .settings import FACTORS, case_id, words_of
from .sparse_families import FAMILIES, save
from .test_against_transformers import MIN_GAP, check
from .tiny import NUM_REQUESTS, NUM_TOKENS, Case, continuations, prompts

NAMES = tuple(FAMILIES)
NUM_GROUPS = {"gpt_oss": 2}
"""KV groups of families in which some layers have a window."""
PAIRS = covering(FACTORS)
WORDS = ["backend=cpu", "kv_cache.prefix_caching=false", "kv_cache.num_blocks=400"]


@pytest.fixture(scope="module")
def sparse_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def sparse_oracle(sparse_folders: dict[str, Path]) -> Any:
    return cache(lambda name: continuations(sparse_folders[name], prompts(NUM_REQUESTS), NUM_TOKENS))


def shares() -> Iterator[Any]:
    """Each family takes a tenth of the array; the rest runs under full."""
    for place, name in enumerate(NAMES):
        for index, case in enumerate(PAIRS):
            asked = {**case, "connector": "none"} if name in NUM_GROUPS else case  # not built for several groups
            marks = () if index % (2 * len(NAMES)) == 2 * place else pytest.mark.full
            yield pytest.param(name, asked, id=f"{name}-{case_id(case)}", marks=marks)


def pool_of(name: str, case: dict[str, Any]) -> str:
    """As many blocks for each KV group as the case gives to one."""
    blocks = next(int(word.rpartition("=")[2]) for word in words_of(case) if word.startswith("kv_cache.num_blocks="))
    return f"kv_cache.num_blocks={1 + NUM_GROUPS.get(name, 1) * (blocks - 1)}"


@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_the_oracle_is_clear_of_ties_and_says_something(name: str, sparse_oracle: Any) -> None:
    assert min(case.gap for case in sparse_oracle(name)) > MIN_GAP
    assert len({token for case in sparse_oracle(name) for token in case.tokens}) > 20


@pytest.mark.usefixtures("fresh_store")
@pytest.mark.parametrize(("name", "case"), [*shares()])
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, case: dict[str, Any], sparse_folders: dict[str, Path], sparse_oracle: Any
) -> None:
    check(name, case, sparse_folders, sparse_oracle, pool_of(name, case))


@pytest.mark.parametrize("name", NAMES)
def test_bit_equal_products_give_the_same_logprobs_alone_and_among_others(
    name: str, sparse_folders: dict[str, Path]
) -> None:
    words = [*WORDS, "engine.batch_invariant=true", "engine.dtype=float32"]
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3)
    asked = [{"prompt_token_ids": p} for p in prompts(5)]
    with LLM(model=str(sparse_folders[name]), overrides=words) as llm:
        together = llm.generate(asked, params, use_tqdm=False)
        for prompt, among in zip(asked, together, strict=True):
            alone = llm.generate([prompt], params, use_tqdm=False)[0]
            assert alone.outputs[0].logprobs == among.outputs[0].logprobs


def add_chosen(counts: Tensor, num_last: int, _router: Any, _inputs: Any, output: tuple[Tensor, ...]) -> None:
    """Counts the experts [T, k] that a router gives to the last tokens, 0 for all."""
    counts += torch.bincount(output[2][-num_last:].flatten(), minlength=len(counts))


@torch.no_grad()
def counts_of_transformers(name: str, folder: Path, cases: list[Case]) -> dict[str, list[int]]:
    """What its routers chose for every token that is computed: all but the last one, and in the last layer those alone
    whose logits say what is drawn."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    counts: dict[str, Tensor] = {}
    last = model.config.num_hidden_layers - 1
    for index, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if router is None:
            continue
        block = "block_sparse_moe" if name == "mixtral" else "mlp"
        counts[f"model.layers.{index}.{block}"] = count = torch.zeros(router.num_experts, dtype=torch.int64)
        router.register_forward_hook(partial(add_chosen, count, NUM_TOKENS if index == last else 0))
    for case in cases:
        model(torch.tensor([[*case.prompt, *case.tokens[:-1]]]))
    return {block: found.tolist() for block, found in counts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_counts_of_experts_are_those_of_the_routers_of_transformers(
    name: str, sparse_folders: dict[str, Path], sparse_oracle: Any
) -> None:
    cases = sparse_oracle(name)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(model=str(sparse_folders[name]), overrides=[*WORDS, "engine.dtype=float32"]) as llm:
        llm.generate([{"prompt_token_ids": case.prompt} for case in cases], params, use_tqdm=False)
        found = llm.expert_counts()
    expected = counts_of_transformers(name, sparse_folders[name], cases)
    assert sum(map(sum, expected.values())) > 1000
    assert found == expected
