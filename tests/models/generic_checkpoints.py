"""Tiny checkpoints of architectures that have no plugin here, for the tests of `model=transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 97
MAX_LEN = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN, "initializer_range": 0.25, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True, "qk_layernorm": True}),
    "cohere2": ("Cohere2ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 4.0}),
    "granite_moe": (
        "GraniteMoeForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3, "logits_scaling": 0.5},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {"num_key_value_heads": None}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "num_key_value_heads": None}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 9}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 9, "head_dim": 16, "attn_logit_softcapping": 5.0}),
    "latent": (
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 8,
            "first_k_dense_replace": 1, "moe_intermediate_size": 24, "num_key_value_heads": 4, "head_dim": 8,
        },
    ),
}  # fmt: skip
"""name: (architecture, edits of SIZES; None drops a key). Windows, caps, sinks, biases and routers are active."""


def make(name: str, *, seed: int = 5, **edits: Any) -> Any:
    """A model of transformers with random weights, norms and biases that are not neutral."""
    import transformers

    architecture, own = ARCHITECTURES[name]
    made = getattr(transformers, architecture)
    words = {key: value for key, value in {**SIZES, **own, **edits}.items() if value is not None or "token" in key}
    torch.manual_seed(seed)
    model = made._from_config(made.config_class(**words), attn_implementation="eager").eval().float()
    with torch.no_grad():
        for label, weight in (*model.named_parameters(), *model.named_buffers()):
            if label.endswith("bias") or "norm" in label or "sinks" in label:
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def save(name: str, folder: Path, *, seed: int = 5, **edits: Any) -> Path:
    make(name, seed=seed, **edits).save_pretrained(folder)
    return folder
