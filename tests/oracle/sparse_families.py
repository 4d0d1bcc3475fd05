"""Tiny checkpoints of the families with mixtures of experts, with everything that a family has switched on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .tiny import MAX_LEN, VOCAB, add_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": MAX_LEN, "initializer_range": 0.25,
    "num_experts_per_tok": 3, "moe_intermediate_size": 20, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False,
    "original_max_position_embeddings": MAX_LEN // 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 7, "sliding_window": 19, "num_hidden_layers": 4, "swiglu_limit": 1.5,
            "rope_parameters": _YARN,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 9, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {"num_experts": 6, "shared_expert_intermediate_size": 28, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 8, "norm_topk_prob": True, "tie_word_embeddings": True}),
}  # fmt: skip
SEEDS = dict.fromkeys(FAMILIES, 1) | {"mixtral": 3}
"""Of which the continuations are clear of ties."""


def save(name: str, folder: Path, **edits: Any) -> Path:
    """The checkpoint of a family, with norms, biases, router biases and sinks that are not neutral. edits: of its
    config."""
    import transformers

    architecture, words = FAMILIES[name]
    made = getattr(transformers, architecture)
    torch.manual_seed(SEEDS[name])
    model = made(made.config_class(**{**SIZES, **words, **edits})).float()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(("bias", "sinks")) or "norm" in key:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder)
    return add_tokenizer(folder)
