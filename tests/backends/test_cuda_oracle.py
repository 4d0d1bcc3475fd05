"""Mixtures, windows, sinks and latents on a CUDA device against transformers: equal greedy tokens, in float32.

One setting has graphs and steps ahead, and a second pass over the prompts, which the prefix cache serves; the other has
short chunks and a pool that most requests are preempted in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import LLM, SamplingParams

from ..oracle import dense_families, latent_families, sparse_families
from ..oracle.tiny import NUM_REQUESTS, NUM_TOKENS, Case, continuations, prompts

pytestmark = pytest.mark.cuda

BLOCK_SIZE, MAX_NUM_SEQS = 16, 12
MIN_GAP = 1e-2
"""Logits of a float32 device are some 1e-4 away; only a step that is closer to a tie than this may go another way."""
TOLERANCE = 5e-3
_COMMON = {"hidden_size": 128, "intermediate_size": 192, "initializer_range": 0.1}
_MIXTURE = {**_COMMON, "head_dim": 32, "moe_intermediate_size": 64}
_LATENT = {
    **_COMMON, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "moe_intermediate_size": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "deepseek_v2": (latent_families, _LATENT, 10),
    "deepseek_v3": (latent_families, _LATENT, 10),
    "qwen3_moe": (sparse_families, _MIXTURE, 10),
    # transformers 5.17 clamps at 7 whatever the config says, later ones as it says
    "gpt_oss": (sparse_families, {**_MIXTURE, "intermediate_size": 64, "swiglu_limit": 7.0}, 13),
    "gemma3": (dense_families, {**_COMMON, "head_dim": 32}, 29),
}
"""Where a tiny checkpoint comes from, sizes that every kernel of products knows, and the blocks of a tight pool: the
longest request has room, and a newcomer is let in whom those that run then drive out. That takes more for each group:
gpt_oss has two, gemma3 six."""


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    families, sizes, _ = FAMILIES[name]
    saved: Path = families.save(name, tmp_path_factory.mktemp(name), **sizes)
    return saved


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[Case]:
    return continuations(folder, prompts(NUM_REQUESTS), NUM_TOKENS)


def served(folder: Path, passes: int, *words: str) -> tuple[list[Any], dict[str, Any]]:
    """The requests of the last pass, and the engine's counts. Nothing is left behind."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=3, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(NUM_REQUESTS)]
    common = ["engine.dtype=float32", f"scheduler.max_num_seqs={MAX_NUM_SEQS}", f"kv_cache.block_size={BLOCK_SIZE}"]
    with LLM(folder, overrides=["backend=cuda", *common, *words]) as llm:
        for _ in range(passes):
            found = llm.generate(asked, params, use_tqdm=False)
        stats = dict(llm.engine.stats())
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
    return found, stats


def assert_equal(found: list[Any], wanted: list[Case]) -> None:
    """Tokens, and logprobs of the best three, up to where two tokens come too close for rounding."""
    num_compared = 0
    for request, case in zip(found, wanted, strict=True):
        output = request.outputs[0]
        for token, entry, want, row in zip(output.token_ids, output.logprobs, case.tokens, case.logprobs, strict=True):
            assert all(abs(one.logprob - float(row[i])) < TOLERANCE for i, one in entry.items())
            num_compared += 1
            if token != want:
                assert float(row[want] - row[token]) < MIN_GAP
                break
    assert num_compared > 0.8 * NUM_REQUESTS * NUM_TOKENS


def test_captured_steps_ahead_and_prefix_hits_give_the_tokens_of_transformers(folder: Path, wanted: list[Case]) -> None:
    found, stats = served(folder, 2, "kv_cache.num_blocks=900")
    assert_equal(found, wanted)
    assert stats["prefix_hit_tokens"] > 0 and found[0].num_cached_tokens > 0


def test_chunks_and_preempted_requests_give_the_tokens_of_transformers(
    name: str, folder: Path, wanted: list[Case]
) -> None:
    pool = f"kv_cache.num_blocks={FAMILIES[name][2]}"
    words = ["engine.async_scheduling=false", "scheduler.max_num_batched_tokens=24", pool]
    found, stats = served(folder, 1, *words)
    assert_equal(found, wanted)
    assert stats["num_preemptions"] > 0
