"""Tiny checkpoints of the dense families beside Llama and Qwen3, with everything that a family has switched on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .tiny import MAX_LEN, VOCAB, add_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN, "initializer_range": 0.25, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_SHORT = [1.0, 1.5, 4.0]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "factor": 4.0,
    "short_factor": _SHORT, "long_factor": [3 * x for x in _SHORT], "original_max_position_embeddings": MAX_LEN,
}  # fmt: skip
_BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": MAX_LEN, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None, "scale_attn_by_inverse_layer_idx": True,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        SIZES
        | {
            "sliding_window": 19, "head_dim": 16, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0, "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        SIZES
        | {
            "num_hidden_layers": 6, "sliding_window": 11, "head_dim": 16, "query_pre_attn_scalar": 12,
            "rope_parameters": _BY_LAYER, "tie_word_embeddings": False,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "mistral": ("MistralForCausalLM", SIZES | {"sliding_window": 21, "head_dim": 16, "num_hidden_layers": 2}),
    "olmo2": ("Olmo2ForCausalLM", SIZES | {"attention_bias": True}),
    "phi3": ("Phi3ForCausalLM", SIZES | {"sliding_window": 40, "rope_parameters": LONGROPE, "num_hidden_layers": 2}),
    "qwen2": (
        "Qwen2ForCausalLM",
        SIZES | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3ForCausalLM", SIZES | {"head_dim": 16, "attention_bias": True, "no_rope_layer_interval": 2}),
}  # fmt: skip
SEEDS = dict.fromkeys(FAMILIES, 1) | {"gemma2": 3, "gpt2": 2, "olmo2": 29, "qwen2": 5, "smollm3": 2}
"""Of which the continuations are clear of ties and not the same token all along."""


def save(name: str, folder: Path, **edits: Any) -> Path:
    """The checkpoint of a family, with norms and biases that are not neutral. edits: of its sizes."""
    import transformers

    architecture, words = FAMILIES[name]
    made = getattr(transformers, architecture)
    torch.manual_seed(SEEDS[name])
    model = made(made.config_class(**{**words, **edits})).float()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("bias") or "norm" in weight_name or ".ln_" in weight_name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return add_tokenizer(folder)
