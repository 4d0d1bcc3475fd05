"""The dense Qwen2 family (Qwen2 and 2.5): Llama with biases of queries, keys and values, and windows that a switch
turns on. Source: Qwen2 (arXiv 2407.10671), section 2.2. Its mixtures of experts are not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework_models.dense import Family, read_count
from framework_models.llama import Llama

WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types")
_MAX_WINDOW_LAYERS = 28  # where config.json has none


def slides_behind(config: Mapping[str, Any], layer: int) -> bool:
    """The layers from `max_window_layers` on have the window."""
    return layer >= read_count(config, "max_window_layers", _MAX_WINDOW_LAYERS)


class Qwen2(Llama):
    """Qwen2ForCausalLM."""

    family: ClassVar[Family] = Family(knows=WINDOW_KEYS, qkv_bias=True, window=4096, slides=slides_behind)
