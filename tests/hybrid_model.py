"""A tiny Llama whose layers take turns between windows and the whole context: what KV groups are tested with.

Its attention is no family's: `hybrid(windows)` gives each layer the window at its place, None for all positions, and a
KV group a window. A checkpoint of any Llama serves.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from framework_models.llama import Llama

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 48, 32, 4, 2, 16, 48


def hybrid(windows: tuple[int | None, ...]) -> type[Llama]:
    """A model of len(windows) layers, to stand in the place of `framework_models.llama.Llama`."""

    class Hybrid(Llama):
        def __init__(self, config: Any, ctx: Any) -> None:
            declare = type(ctx).add_layer

            def add_layer(group: str, *args: Any, **kwargs: Any) -> int:
                window = windows[len(ctx.layers)]
                name = "full" if window is None else f"w{window}"
                return declare(ctx, name, *args, **{**kwargs, "window": window})

            ctx.add_layer = add_layer
            super().__init__(config, ctx)

    return Hybrid


def save_random(folder: Path, num_layers: int, seed: int = 0) -> Path:
    """A checkpoint with weights so large that every key that is read changes the logits."""
    import json

    gen = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen) * 0.3

    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "lm_head.weight": random(VOCAB, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = random(rows * HEAD_DIM, HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{layer}.mlp.gate_proj.weight"] = random(MLP, HIDDEN)
        weights[f"{layer}.mlp.up_proj.weight"] = random(MLP, HIDDEN)
        weights[f"{layer}.mlp.down_proj.weight"] = random(HIDDEN, MLP)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(HIDDEN)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": MLP, "num_hidden_layers": num_layers, "num_attention_heads": HEADS, "hidden_act": "silu",
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
