"""Tiny checkpoints of the families with latent attention, with everything that a family has switched on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .tiny import MAX_LEN, VOCAB, add_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.25, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": MAX_LEN // 4,
    "mscale": 0.707, "mscale_all_dim": 1.1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"q_lora_rank": 16, "n_shared_experts": 1, "attention_bias": True}),
}
SEEDS = {"deepseek_v2": 1, "deepseek_v3": 1}


def save(name: str, folder: Path, **edits: Any) -> Path:
    """The checkpoint of a family, with norms, biases and router biases that are not neutral. edits: of its config."""
    import transformers

    architecture, words = FAMILIES[name]
    made = getattr(transformers, architecture)
    torch.manual_seed(SEEDS[name])
    model = made(made.config_class(**{**SIZES, **words, **edits})).float()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("bias") or "norm" in key:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder)
    return add_tokenizer(folder)
