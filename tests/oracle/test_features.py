"""What a request may ask for, over a mixture of experts, one with windows and sinks, and latent attention: tokens and
logprobs of every request are those that it gets alone, bit for bit, whatever surrounds it.

Constraints, penalties, seeds and logprobs stand together with chunks, caches, tight pools and both kinds of preemption.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from framework import SamplingParams

from . import latent_families, sparse_families
from .covering import covering
from .running import run_case
from .settings import BASE, words_of
from .tiny import prompts

FACTORS: dict[str, list[Any]] = {
    "family": ["qwen3_moe", "gpt_oss", "deepseek_v3"],
    "constraint": ["none", "regex", "choice"],
    "penalties": ["off", "on"],
    "draw": ["greedy", "seeded"],
    "logprobs": ["off", "on"],
    "pool": ["roomy", "tight"],
    "preemption": ["recompute", "swap"],
    "chunk": [7, 4096],
    "cache": ["off", "warm"],
    "steps": ["sync", "async"],
    "dtype": ["float32", "bfloat16"],
}
CASES = covering(FACTORS)
NUM_GROUPS = {"gpt_oss": 2}
NUM_ASKED = 6
CONSTRAINTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "regex": {"regex": "[ab]{4,9}(ca|bc)+"},
    "choice": {"choice": ["abcabcabc", "cabbaca", "bbbbbcccca"]},
}


def params_of(case: dict[str, Any], index: int) -> SamplingParams:
    """Of request `index`: what a case asks for stands beside requests without it."""
    has_all = index != 3
    seeded: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 100 + index}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    return SamplingParams(
        max_tokens=12,
        logprobs=4 if case["logprobs"] == "on" and has_all else None,
        structured_outputs=CONSTRAINTS[case["constraint"]] if has_all else None,
        **(seeded if case["draw"] == "seeded" else {"temperature": 0.0}),
        **(penalties if case["penalties"] == "on" and has_all else {}),
    )


def told(output: Any) -> list[Any]:
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in output.outputs]


def words_for(case: dict[str, Any], setting: dict[str, Any]) -> list[str]:
    """As many blocks for each KV group as the setting gives to one, and bits that do not depend on the batch."""
    blocks = next(int(w.rpartition("=")[2]) for w in words_of(setting) if w.startswith("kv_cache.num_blocks="))
    pool = f"kv_cache.num_blocks={1 + NUM_GROUPS.get(case['family'], 1) * (blocks - 1)}"
    return ["engine.batch_invariant=true", f"engine.dtype={case['dtype']}", pool]


@pytest.fixture(scope="module")
def feature_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def save(name: str) -> Path:
        families = latent_families if name in latent_families.FAMILIES else sparse_families
        return families.save(name, tmp_path_factory.mktemp(name))

    return cache(save)


def spread() -> list[Any]:
    """Every third case stands in the default run, and all of them, which make the array whole, under full."""
    marks = [() if index % 3 == 2 else pytest.mark.full for index in range(len(CASES))]
    names = ["-".join(map(str, case.values())) for case in CASES]
    return [pytest.param(case, id=name, marks=mark) for case, name, mark in zip(CASES, names, marks, strict=True)]


@pytest.mark.parametrize("case", spread())
def test_what_requests_ask_for_is_what_they_get_alone(case: dict[str, Any], feature_folder: Any) -> None:
    asked = prompts(NUM_ASKED)
    params = [params_of(case, index) for index in range(NUM_ASKED)]
    folder = feature_folder(case["family"])
    alone, _ = run_case(folder, BASE, asked, params, *words_for(case, BASE))
    setting = BASE | {key: case[key] for key in ("pool", "preemption", "chunk", "cache", "steps")} | {"concurrent": 7}
    among, stats = run_case(folder, setting, asked, params, *words_for(case, setting))
    assert [told(output) for output in among] == [told(output) for output in alone]
    if case["constraint"] != "choice" and case["family"] not in NUM_GROUPS:  # few tokens, and blocks that come back
        assert (stats["num_preemptions"] > 0) == (case["pool"] == "tight")
    if case["constraint"] == "choice":
        texts = [output.outputs[0].text for index, output in enumerate(among) if index != 3]
        assert set(texts) <= set(CONSTRAINTS["choice"]["choice"])  # type: ignore[index]


@pytest.mark.parametrize("family", FACTORS["family"])
def test_each_thing_that_is_asked_for_changes_what_requests_get(family: str, feature_folder: Any) -> None:
    """So that equal tokens are no sign of a parameter that nobody reads."""
    plain = {name: values[0] for name, values in FACTORS.items()} | {"family": family}
    texts = []
    for edit in ({}, {"constraint": "regex"}, {"penalties": "on"}, {"draw": "seeded"}):
        params = [params_of(plain | edit, 0)]
        outputs, _ = run_case(feature_folder(family), BASE, prompts(1), params, *words_for(plain, BASE))
        texts.append(outputs[0].outputs[0].text)
    assert len(set(texts)) == 4
