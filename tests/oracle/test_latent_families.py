"""Latent attention in the engine against transformers: equal greedy tokens and logprobs in every setting."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework import LLM, SamplingParams
from framework.errors import CheckpointError

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


def test_attention_of_deepseek_v2_lite_keeps_30_kib_a_token(tmp_path: Path) -> None:
    """27 layers of 512 + 64 values, in whatever width the rest of the model has: 31,104 bytes in bfloat16."""
    lite = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    words = {**SIZES, **lite, "v_head_dim": 128, "q_lora_rank": None, "architectures": ["DeepseekV2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(words))
    overrides = ["backend=cpu", "engine.dtype=bfloat16", "engine.load_format=dummy", "kv_cache.num_blocks=10"]
    with LLM(model=str(tmp_path), overrides=overrides) as llm:
        facts = llm.engine.facts
    assert facts["kv_bytes"] / (facts["num_blocks"] * facts["block_size"]) == 31_104 == 30.375 * 1024


def with_a_layer_behind(folder: Path, target: Path, num_declared: int) -> Path:
    """The checkpoint with weights of one further layer, and a config that declares so many that predict further."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    behind = SIZES["num_hidden_layers"]
    for name in ("eh_proj.weight", "self_attn.o_proj.weight", "mlp.experts.0.up_proj.weight"):
        tensors[f"model.layers.{behind}.{name}"] = torch.zeros(3, 5)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": num_declared}))
    return target


def test_layers_that_predict_further_tokens_are_left_out_of_the_main_model(
    latent_folders: dict[str, Path], latent_oracle: Any, tmp_path: Path
) -> None:
    folder = with_a_layer_behind(latent_folders["deepseek_v3"], tmp_path / "declared", 1)
    want, words = latent_oracle("deepseek_v3")[0], ["backend=cpu", "engine.dtype=float32"]
    with LLM(model=str(folder), overrides=words) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        (output,) = llm.generate([{"prompt_token_ids": want.prompt}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == want.tokens
    folder = with_a_layer_behind(latent_folders["deepseek_v3"], tmp_path / "undeclared", 0)
    with pytest.raises(CheckpointError, match=r"3 tensors are not used by model 'deepseek_v3', model\.layers\.3\."):
        LLM(model=str(folder), overrides=words)
