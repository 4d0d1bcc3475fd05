"""A random transformers checkpoint, and our model over it: what the files of this folder compare."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework_loaders.safetensors import SafetensorsLoader

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "initializer_range": 0.25,
    "rms_norm_eps": 1e-5, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
IDS = torch.tensor([3, 17, 95, 0, 41, 41, 8, 60, 22, 5, 77, 31, 90, 2, 13, 64, 50, 7])
# float32 against float32 with another order of sums; logits reach about 20.
TOLERANCE = 1e-4


def saved(folder: Path, config: Any, model_class: Any, ids: Tensor = IDS) -> Tensor:
    """Logits [T, V] of a model with random weights, which is saved."""
    torch.manual_seed(5)
    config._attn_implementation = "eager"  # the one that knows soft caps
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias") or "norm" in name or ".ln_" in name:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(ids[None]).logits[0]


def ours(
    build_model: Any,
    folder: Path,
    target: Any,
    *,
    dtype: torch.dtype = torch.float32,
    length: int = 64,
    leaves: Sequence[str] = (),
    **edits: Any,
) -> Any:
    """Our model over what was saved; no tensor of the file is left but what the expressions of `leaves` name."""
    loader = SafetensorsLoader({})
    checkpoint = loader.checkpoint(folder)
    source = loader.open(checkpoint, dtype=dtype, device=torch.device("cpu"), seed=0)
    built = build_model(target, {**checkpoint.config, **edits}, source, dtype=dtype, max_model_len=length)
    assert [name for name in source.unused() if not any(re.fullmatch(left, name) for left in leaves)] == []
    source.close()
    return built
