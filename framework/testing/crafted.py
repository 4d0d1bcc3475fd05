"""Checkpoints whose next-token logits are a table of the last token: every sampling rule can be checked from outside.

One-hot embeddings pass through layers whose output projections are zero, and the head holds the table, so that logits
are exact up to one float32 rounding. Written as an ordinary Llama folder; any loader and backend may read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def save_crafted(
    folder: Path, table: Tensor, *, eos_token_id: int | Sequence[int] | None = None, max_len: int = 256, **config: Any
) -> Path:
    """Writes a folder whose model gives logits `table[last token]`. table [V, V] float32. Returns the folder."""
    import torch
    from safetensors.torch import save_file

    vocab, heads = table.shape[0], 2
    hidden = -(-vocab // 16) * 16
    head_dim = hidden // heads
    eye = torch.zeros(vocab, hidden)
    eye[torch.arange(vocab), torch.arange(vocab)] = 1.0
    head = torch.zeros(vocab, hidden)
    head[:, :vocab] = table.float().T
    layer = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": eye,
        # RMSNorm of a one-hot row is sqrt(hidden) at its place.
        "model.norm.weight": torch.full((hidden,), hidden**-0.5),
        "lm_head.weight": head,
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}.mlp.gate_proj.weight": torch.ones(16, hidden),
        f"{layer}.mlp.up_proj.weight": torch.ones(16, hidden),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, 16),
        **{f"{layer}.self_attn.{p}_proj.weight": torch.zeros(hidden, hidden) for p in "qkvo"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    header = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(header))
    return folder
