"""The config.json of a dense decoder, read and checked once: the numbers a model is assembled from.

A key that changes the output and is not built yet is refused by name; missing sizes are refused too. No tensor is
touched here. Used by the model families of this package.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import CheckpointError
from framework.layers.rope import RopeConfig, read_rope

# key -> values that leave the output as it is; any other value asks for something that is not built.
_INERT: Mapping[str, Collection[Any]] = {
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "clip_qkv": (None,),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "attention_chunk_size": (None,),
    "num_nextn_predict_layers": (None, 0),
}
_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True)
class DenseConfig:
    """Sizes and switches of a Llama-like decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig


def read_dense(
    config: Mapping[str, Any], *, head_dim: int | None = None, mlp_bias: bool = False, window_key: bool = False
) -> DenseConfig:
    """DenseConfig of a config.json. Raises CheckpointError naming the key, its value and what is served.

    head_dim    the family's value when config.json has none; None = hidden_size / num_attention_heads
    mlp_bias    whether the family knows `mlp_bias`; one that does not has none
    window_key  whether the family's config always carries `sliding_window`, switched by `use_sliding_window`
    """
    _refuse_what_is_not_built(config, window_key)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}. Correct it."
        )
    head_dim = _size(config, "head_dim", head_dim or hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim={head_dim} is odd; rotary embedding turns pairs. Correct config.json.")
    return DenseConfig(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_epsilon(config, "rms_norm_eps", 1e-6),
        tied=_switch(config, "tie_word_embeddings"),
        attention_bias=_switch(config, "attention_bias"),
        mlp_bias=mlp_bias and _switch(config, "mlp_bias"),
        rope=read_rope(config),
    )


def _refuse_what_is_not_built(config: Mapping[str, Any], window_key: bool) -> None:
    for key, inert in _INERT.items():
        if config.get(key) not in inert:
            raise CheckpointError(f"config.json: {key}={config[key]!r} is not built yet. Use a checkpoint without it.")
    if not window_key and config.get("sliding_window") is not None:
        window = config["sliding_window"]
        raise CheckpointError(f"config.json: sliding_window={window} is not built yet. Use a checkpoint without it.")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise CheckpointError(f"config.json: layer_types must be a list of words, got {layer_types!r}.")
    if others := sorted({str(word) for word in layer_types} - {"full_attention"}):
        raise CheckpointError(f"config.json: layer_types {', '.join(others)} are not built yet, full_attention is.")
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act={activation!r} is not served. Served: {', '.join(_ACTIVATIONS)}. "
            "Use a checkpoint of one of these."
        )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no '{key}', which the model needs. Add it.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a whole number of at least 1, got {value!r}.")
    return value


def _epsilon(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < 1):  # NaN is inside of nothing
        raise CheckpointError(f"config.json: {key} must be a number in [0, 1), got {value!r}.")
    return float(value)


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}.")
    return bool(value)
