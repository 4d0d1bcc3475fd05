"""Everything that shapes a token over a mixture of experts and a latent attention: the same as alone, bit for bit.

Grammar, penalties, logprobs, seeds and preemption stand in the cases in pairs. That each of them does what it says is
tested elsewhere, with models of known logits; here it must not depend on how such a model is run.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import SamplingParams

from . import latent_families
from .covering import covering
from .running import run_case
from .settings import BASE, case_id
from .tiny import MAX_LEN, VOCAB, add_tokenizer, prompts

FACTORS: dict[str, list[Any]] = {
    "grammar": ["off", "some", "all"],
    "penalties": ["off", "on"],
    "logprobs": ["off", "on"],
    "draw": ["greedy", "seeded", "both"],
    "preemption": ["never", "recompute", "swap"],
    "cache": ["off", "cold", "warm"],
    "steps": ["sync", "async"],
    "chunk": [7, 64, 4096],
    "concurrent": [3, 16],
    "dtype": ["float32", "bfloat16"],
}
PAIRS = covering(FACTORS)
NUM_PROMPTS, NUM_TOKENS = 8, 16
REGEX, PREFIX = "(ab|c){80,}", "(ab|c)*a?"
"""A text that is never whole within NUM_TOKENS tokens of 4 letters at most, and what it may begin with."""
NAMES = ("deepseek_v3", "qwen3_moe")


def save_qwen3_moe(folder: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
        norm_topk_prob=True, max_position_embeddings=MAX_LEN, initializer_range=0.25, eos_token_id=None,
        bos_token_id=None, pad_token_id=None, mlp_only_layers=[0],
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return add_tokenizer(folder)


@pytest.fixture(scope="module")
def sampled_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    deepseek = latent_families.save("deepseek_v3", tmp_path_factory.mktemp("deepseek_v3"))
    return {"deepseek_v3": deepseek, "qwen3_moe": save_qwen3_moe(tmp_path_factory.mktemp("qwen3_moe"))}


def has_grammar(case: dict[str, Any], index: int) -> bool:
    return case["grammar"] == "all" or (case["grammar"] == "some" and index % 2 == 0)


def params_of(case: dict[str, Any], index: int) -> SamplingParams:
    """Of request `index`: what a case asks for stands beside requests that ask for other values of it."""
    is_drawn = case["draw"] == "seeded" or (case["draw"] == "both" and index % 3 != 0)
    draw = {"temperature": 0.9, "seed": 1000 + index, "top_p": 0.95} if is_drawn else {"temperature": 0.0}
    penalties = {"repetition_penalty": 1.1 + index / 20, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        structured_outputs={"regex": REGEX} if has_grammar(case, index) else None,
        logprobs=3 if case["logprobs"] == "on" and index % 2 else None,
        **draw,
        **(penalties if case["penalties"] == "on" else {}),
    )


def setting_of(case: dict[str, Any]) -> dict[str, Any]:
    """The case in the words of the oracle's array."""
    is_tight = case["preemption"] != "never"
    return {
        **BASE,
        "block_size": 8,
        **{key: case[key] for key in ("chunk", "concurrent", "cache", "steps")},
        "pool": "tight" if is_tight else "roomy",
        "preemption": case["preemption"] if is_tight else "recompute",
    }


def words_for(dtype: str) -> list[str]:
    return ["engine.batch_invariant=true", f"engine.dtype={dtype}"]


def told(outputs: list[Any]) -> list[Any]:
    """Tokens, and the logprobs of those that ask for them, to the last bit."""
    made = []
    for output in outputs:
        (completion,) = output.outputs
        entries = [{i: (e.logprob, e.rank) for i, e in entry.items()} for entry in completion.logprobs or ()]
        made.append((completion.token_ids, completion.finish_reason, entries))
    return made


@pytest.fixture(scope="module")
def alone(sampled_folders: dict[str, Path]) -> Any:
    """What each request gives by itself, in one chunk, a step at a time and without a cache."""

    @cache
    def run(name: str, dtype: str, asked: tuple[tuple[str, Any], ...]) -> list[Any]:
        params = [params_of(dict(asked), index) for index in range(NUM_PROMPTS)]
        outputs, _ = run_case(sampled_folders[name], BASE, prompts(NUM_PROMPTS), params, *words_for(dtype))
        return told(outputs)

    return lambda name, case: run(
        name, case["dtype"], tuple((key, case[key]) for key in ("grammar", "penalties", "logprobs", "draw"))
    )


def cases() -> list[Any]:
    """One model a case by turns, and the other one under full."""
    made = []
    for index, case in enumerate(PAIRS):
        for place, name in enumerate(NAMES):
            marks = () if index % 2 == place else pytest.mark.full
            made.append(pytest.param(name, case, id=f"{name}-{case_id(case)}", marks=marks))
    return made


@pytest.mark.parametrize(("name", "case"), cases())
def test_tokens_and_logprobs_are_those_of_the_request_alone(
    name: str, case: dict[str, Any], sampled_folders: dict[str, Path], alone: Any
) -> None:
    params = [params_of(case, index) for index in range(NUM_PROMPTS)]
    outputs, stats = run_case(
        sampled_folders[name], setting_of(case), prompts(NUM_PROMPTS), params, *words_for(case["dtype"])
    )
    assert told(outputs) == alone(name, case)
    for index, output in enumerate(outputs):
        assert not has_grammar(case, index) or re.fullmatch(PREFIX, output.outputs[0].text)
    if case["preemption"] == "never":
        assert stats["num_preemptions"] == 0
    elif case["concurrent"] == 16:
        assert stats["num_preemptions"] > 0
    assert (stats["num_swap_outs"] > 0) == (case["preemption"] == "swap" and stats["num_preemptions"] > 0)


def test_what_cases_ask_for_does_change_tokens(alone: Any) -> None:
    """So that tokens which are the same as alone are no sign of parameters that nobody reads."""
    plain = {"grammar": "off", "penalties": "off", "logprobs": "off", "draw": "greedy", "dtype": "float32"}
    for name in NAMES:
        tokens = [row[0] for row in alone(name, plain)]
        for edit in ({"grammar": "all"}, {"penalties": "on"}, {"draw": "seeded"}):
            assert all(one != other[0] for one, other in zip(tokens, alone(name, {**plain, **edit}), strict=True)), edit
