"""Dense families on a CUDA device: the tokens and logprobs of the host's engine, in float32 and through graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import LLM, SamplingParams

from ..oracle.dense_families import FAMILIES, LONGROPE, save
from ..oracle.tiny import prompts

pytestmark = pytest.mark.cuda

COMMON = ("engine.dtype=float32", "kv_cache.num_blocks=900", "scheduler.max_num_seqs=16")
NUM_PROMPTS, TOP = 9, 5
MIN_GAP, TOLERANCE = 1e-2, 5e-3
"""Sums of float32 in another order, through a few layers of logits that reach 20."""
_FACTORS = [1.0 + 0.3 * i for i in range(12)]


def sizes(name: str) -> dict[str, Any]:
    """Heads of 32, which every kernel of attention knows."""
    if name == "gpt2":
        return {"n_embd": 128}
    own = {"head_dim": 32} if "head_dim" in FAMILIES[name][1] else {}
    if name == "phi3":
        own["rope_parameters"] = {**LONGROPE, "short_factor": _FACTORS, "long_factor": _FACTORS}
    return {"hidden_size": 128, "intermediate_size": 192, "initializer_range": 0.1, **own}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param), **sizes(request.param))


@pytest.fixture(scope="module")
def host(folder: Path) -> list[Any]:
    return served(folder, "backend=cpu")


def served(folder: Path, *words: str) -> list[Any]:
    """The first completion of each prompt; all stand in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=TOP, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(NUM_PROMPTS)]
    with LLM(folder, overrides=[*COMMON, *words]) as llm:
        found = llm.generate(asked, params, use_tqdm=False)
        stats = llm.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
    return [output.outputs[0] for output in found]


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    """Logprobs are near, and a token differs only where two come too close for rounding: what follows is another
    text."""
    num_compared = 0
    for one, other in zip(found, wanted, strict=True):
        pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
        for token, wanted_token, entry, expected in pairs:
            assert all(abs(entry[i].logprob - e.logprob) < TOLERANCE for i, e in expected.items() if i in entry)
            num_compared += 1
            if token != wanted_token:
                assert expected[wanted_token].logprob - expected[token].logprob < MIN_GAP
                break
    assert num_compared > 0.8 * sum(len(one.token_ids) for one in wanted)


@pytest.mark.parametrize(
    "words",
    [(), ("engine.graphs=off", "scheduler.max_num_batched_tokens=16"), ("engine.batch_invariant=true",)],
    ids=["graphs", "chunks", "invariant"],
)
def test_tokens_and_logprobs_are_those_of_the_host(folder: Path, host: list[Any], words: tuple[str, ...]) -> None:
    assert_alike(served(folder, "backend=cuda", *words), host)
