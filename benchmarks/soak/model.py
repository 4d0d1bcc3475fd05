"""A tiny random Llama checkpoint whose tokens hang on the whole context, with a tokenizer of short texts."""

from __future__ import annotations

import json
from itertools import chain, product
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, NUM_LAYERS, MAX_LEN = 97, 32, 2, 1, 16, 48, 2, 128
EOS = VOCAB - 1
PIECES = [
    "".join(letters) for letters in chain.from_iterable(product("abc", repeat=length) for length in (1, 2, 3, 4))
][:VOCAB]
"""Text of each token: few letters, so that stop strings come, and across the borders of tokens."""


def save_model(folder: Path) -> Path:
    """Writes the checkpoint. Its weights are large, so that a wrong KV entry changes tokens and not only logits."""
    save_file(_weights(), str(folder / "model.safetensors"))
    header = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": MLP, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "eos_token_id": EOS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(header))
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.25

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    return weights
