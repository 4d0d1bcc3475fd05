"""A whole engine whose latent layers hand projections to our kernels, in the interpreter, and the host's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import LLM, SamplingParams
from framework.interfaces import TakesLatentProjections

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the device that is visible")

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "max_position_embeddings": 256, "rope_theta": 100.0,
    "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
WORDS = (
    "backend=cpu", "attention=mla_torch", "engine.load_format=dummy", "engine.dtype=float32",
    "scheduler.max_num_seqs=5", "kv_cache.num_blocks=40", "engine.max_model_len=120",
    "scheduler.max_num_batched_tokens=80",
)  # fmt: skip
LENGTHS = (3, 71, 20)
"""Of prompts: the second is expanded, the others are absorbed, and together they are more than a step computes."""


def served(folder: Path, *words: str) -> list[Any]:
    prompts = [[(7 * i + j) % 300 for j in range(n)] for i, n in enumerate(LENGTHS)]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with LLM(folder, overrides=[*WORDS, *words]) as llm:
        return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("invariant", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_tokens_are_those_of_the_host(invariant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from framework_attention.triton.latent import LatentTriton, LatentTritonPlan

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    word = f"engine.batch_invariant={invariant}"
    wanted = served(tmp_path, word)
    layers: list[int] = []
    forward = LatentTritonPlan.forward_latent_projections

    def noted(self: LatentTritonPlan, layer: int, *args: Any) -> torch.Tensor:
        layers.append(layer)
        return forward(self, layer, *args)

    monkeypatch.setattr(LatentTritonPlan, "forward_latent_projections", noted)
    monkeypatch.setattr("framework_attention.mla_torch.MlaTorch", LatentTriton)
    assert served(tmp_path, word) == wanted
    assert issubclass(LatentTritonPlan, TakesLatentProjections) and set(layers) == {0, 1}
