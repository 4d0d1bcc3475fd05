"""The SmolLM3 family: Llama in which some layers do not rotate, so that positions come from the causal mask alone there
(NoPE, arXiv 2501.18795). Source: its config and model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.errors import CheckpointError
from framework_models.dense import Family, read_size
from framework_models.llama import Llama
from framework_models.qwen2 import WINDOW_KEYS

_INTERVAL = 4  # every so many layers one does not rotate, where config.json does not say


def rotates(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer rotates: `no_rope_layers` has a 1 for it, or its place in the interval says so."""
    listed = config.get("no_rope_layers")
    if listed is None:
        return (layer + 1) % read_size(config, "no_rope_layer_interval", _INTERVAL) != 0
    if not isinstance(listed, list) or not len(listed) > layer or listed[layer] not in (0, 1):
        raise CheckpointError(
            f"config.json: no_rope_layers must hold a 0 or a 1 for each layer, got {listed!r}. Correct it."
        )
    return bool(listed[layer])


class SmolLM3(Llama):
    """SmolLM3ForCausalLM."""

    family: ClassVar[Family] = Family(
        knows=("attention_bias", "mlp_bias", "no_rope_layers", *WINDOW_KEYS),
        tied=True,
        theta=2_000_000.0,
        slides=lambda config, layer: not rotates(config, layer),
        rotates=rotates,
    )
