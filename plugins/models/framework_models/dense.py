"""The config.json of a decoder, read and checked once: the numbers a model is assembled from.

A family states which keys it reads itself and what it takes for those that are missing; a key beyond them that changes
the output is refused by name. No tensor is touched here. Used by the model families of this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import CheckpointError
from framework.layers.rope import DEFAULT_THETA, RopeConfig, read_rope

_INERT: Mapping[str, Collection[Any]] = {
    **dict.fromkeys(
        (
            "quantization_config", "text_config", "kv_lora_rank", "sliding_window", "sliding_window_pattern",
            "sliding_window_size", "interleaved_sliding_window", "attention_window_size", "attention_chunk_size",
            "index_topk", "attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap",
            "query_pre_attn_scalar", "attention_multiplier", "llama_4_scaling", "clip_qkv", "rope_local_base_freq",
            "layer_rope_theta", "mlp_layer_types", "swiglu_alpha", "swiglu_limit", "scale_emb", "scale_depth",
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            "use_sliding_window", "rope_interleave", "rope_interleaved", "use_qk_norm", "qk_layernorm", "alibi",
            "use_parallel_residual", "use_bidirectional_attention", "prefix_lm", "is_encoder_decoder",
            "attn_temperature_tuning",
        ),
        (None, False),
    ),
    **dict.fromkeys(
        (
            "logit_scale", "logits_scaling", "lm_head_multiplier", "embedding_multiplier", "embedding_scale",
            "residual_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
            "attention_value_scale", "routed_scaling_factor", "partial_rotary_factor",
        ),
        (None, 1),
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_nextn_predict_layers", "num_kv_shared_layers"),
        (None, 0),
    ),
    **dict.fromkeys(("dual_chunk_attention_config", "per_layer_config"), (None, {})),
    "num_local_experts": (None, 0, 1),
    "no_rope_layers": (None, []),
    "is_causal": (None, True),
}  # fmt: skip
"""key -> values that leave the output as it is; any other value asks for something that the family does not have.

Not only of these families: what another family, or another engine, reads under a name changes what was trained, and a
checkpoint may have it under an architecture that is served. Features that have tensors of their own need not be here:
those would be left over, which is an error as well.
"""
_CHUNKS = "dual_chunk_attention_config"
_SILU = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")

OfLayer = Callable[[Mapping[str, Any], int], bool]


@dataclass(frozen=True)
class Family:
    """What the config.json of a family may say, and what it means where it says nothing.

    knows         keys that change the output and that the family reads: those of `_INERT`, and `layer_types`,
                  `attention_bias` and `mlp_bias`
    head_dim      None: hidden_size / num_attention_heads
    tied          `tie_word_embeddings`
    qkv_bias      of a family whose config has no key for it
    slides        (config, layer) -> whether a layer has the window, where `layer_types` does not say. For a family that
                  knows `sliding_window`
    rotates       (config, layer) -> whether a layer rotates queries and keys
    activation    key of the feed-forward block's activation, and the names of the one it has
    window, attention_cap, logit_cap, query_scalar  of a config without the key, in a family that knows it
    """

    knows: Collection[str] = ("attention_bias",)
    head_dim: int | None = None
    eps: float = 1e-6
    tied: bool = False
    theta: float = DEFAULT_THETA
    qkv_bias: bool = False
    window: int | None = None
    slides: OfLayer = lambda config, layer: True
    rotates: OfLayer = lambda config, layer: True
    attention_cap: float | None = None
    logit_cap: float | None = None
    query_scalar: float | None = None
    activation: tuple[str, Collection[str]] = ("hidden_act", _SILU)


@dataclass(frozen=True)
class DenseConfig:
    """Sizes and switches of a decoder.

    windows      of each layer: readable positions, None for all
    rotated      of each layer: whether it rotates queries and keys
    window_rope  how layers with a window rotate, None for as the others
    scale        of attention scores, None for head_dim ** -0.5
    attention_cap, logit_cap  soft caps of scores and logits
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    rotated: tuple[bool, ...]
    window_rope: RopeConfig | None = None
    scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None


def read_dense(config: Mapping[str, Any], family: Family, *, rope: RopeConfig | None = None) -> DenseConfig:
    """DenseConfig of a config.json; rope: what the family has read by itself. Raises CheckpointError naming the key,
    its value and what is served."""
    refuse_unknown(config, family)
    hidden, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
    num_layers = read_size(config, "num_hidden_layers")
    has_bias = "attention_bias" in family.knows and read_switch(config, "attention_bias")
    return DenseConfig(
        vocab_size=read_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(config, heads),
        head_dim=_head_dim(config, family.head_dim or hidden // heads),
        rms_norm_eps=read_epsilon(config, "rms_norm_eps", family.eps),
        tied=read_switch(config, "tie_word_embeddings", family.tied),
        qkv_bias=family.qkv_bias or has_bias,
        out_bias=has_bias,
        mlp_bias="mlp_bias" in family.knows and read_switch(config, "mlp_bias"),
        rope=rope or read_rope(config, theta=family.theta, is_partial="partial_rotary_factor" in family.knows),
        windows=read_windows(config, family, num_layers),
        rotated=tuple(family.rotates(config, layer) for layer in range(num_layers)),
        scale=_scale(config, family),
        attention_cap=_known_number(config, family, "attn_logit_softcapping", family.attention_cap),
        logit_cap=_known_number(config, family, "final_logit_softcapping", family.logit_cap),
    )


# ------------------------------------------------------------------------------------------------------------- windows


def read_windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None for all positions."""
    window = _window(config, family)
    slides = [window is not None and family.slides(config, layer) for layer in range(num_layers)]
    words = config.get("layer_types")
    if words is not None:
        _check_layer_types(words, num_layers, slides, "layer_types" in family.knows)
        slides = [word == "sliding_attention" for word in words] or slides
    if any(slides) and window is None:
        raise CheckpointError("config.json: layer_types has sliding_attention, but no sliding_window is on. Add it.")
    return tuple(window if has_window else None for has_window in slides)


def _window(config: Mapping[str, Any], family: Family) -> int | None:
    """The window in use."""
    is_off = "use_sliding_window" in family.knows and not read_switch(config, "use_sliding_window")
    if "sliding_window" not in family.knows or is_off or config.get("sliding_window", family.window) is None:
        return None
    return read_size(config, "sliding_window", family.window)


def _check_layer_types(words: Any, num_layers: int, slides: list[bool], is_known: bool) -> None:
    if not isinstance(words, list):
        raise CheckpointError(f"config.json: layer_types must be a list of words, got {words!r}.")
    served = _LAYER_TYPES if is_known else sorted({_LAYER_TYPES[does] for does in slides})
    if others := sorted({str(word) for word in words} - set(served)):
        raise CheckpointError(
            f"config.json: layer_types {', '.join(others)} are not built yet, {' and '.join(served)} is. "
            "Use a checkpoint without it."
        )
    if words and len(words) != num_layers:
        raise CheckpointError(f"config.json: layer_types has {len(words)} words for num_hidden_layers={num_layers}.")


# ---------------------------------------------------------------------------------------------------- single keys


def refuse_unknown(config: Mapping[str, Any], family: Family) -> None:
    """Raises CheckpointError for a key that changes the output and that the family does not know."""
    for key, inert in _INERT.items():
        if key not in family.knows and config.get(key) not in inert:
            raise CheckpointError(f"config.json: {key}={config[key]!r} is not built yet. Use a checkpoint without it.")
    for key in ("attention_bias", "mlp_bias"):
        if key not in family.knows and read_switch(config, key):
            raise CheckpointError(f"config.json: {key}=true is unknown to this family. Use a checkpoint without it.")
    key, served = family.activation
    activation = config.get(key) or next(iter(served))
    if activation not in served:
        raise CheckpointError(
            f"config.json: {key}={activation!r} is not served. Served: {', '.join(served)}. "
            "Use a checkpoint of one of these."
        )


def within_one_chunk(config: Mapping[str, Any], max_model_len: int) -> Mapping[str, Any]:
    """The config without dual chunk attention, which is the plain one as long as a request lies in the first chunk.

    Raises CheckpointError naming the longest max_model_len for which it does. One that leaves keys of a long prompt out
    (`sparse_...`) stays, to be refused. Source: Qwen2.5-1M (arXiv 2501.15383), section 4.1.
    """
    chunks = config.get(_CHUNKS)
    if not (isinstance(chunks, Mapping) and chunks) or any(key.startswith("sparse") for key in chunks):
        return config
    most = read_size(chunks, "chunk_size") - read_count(chunks, "local_size", 0)
    most = max(1, min(most, read_size(chunks, "original_max_position_embeddings", max(1, most))))
    if max_model_len > most:
        raise CheckpointError(
            f"config.json: {_CHUNKS}={chunks!r} is not built yet for requests beyond the first chunk of {most} tokens, "
            f"and max_model_len is {max_model_len}. Use engine.max_model_len={most}."
        )
    return {key: value for key, value in config.items() if key != _CHUNKS}


def _scale(config: Mapping[str, Any], family: Family) -> float | None:
    scalar = _known_number(config, family, "query_pre_attn_scalar", family.query_scalar)
    return None if scalar is None else scalar**-0.5


def _known_number(config: Mapping[str, Any], family: Family, key: str, default: float | None) -> float | None:
    """A number above 0 or None, of a key that the family knows; None of another one."""
    return read_factor(config.get(key, default), key) if key in family.knows else None


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    kv_heads = read_size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}. Correct it."
        )
    return kv_heads


def _head_dim(config: Mapping[str, Any], default: int) -> int:
    head_dim = read_size(config, "head_dim", default)
    if head_dim % 2:
        raise CheckpointError(f"head_dim={head_dim} is odd; rotary embedding turns pairs. Correct config.json.")
    return head_dim


def read_size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1. Raises CheckpointError for another value, or for none without a default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no '{key}', which the model needs. Add it.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a whole number of at least 1, got {value!r}.")
    return value


def read_count(config: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number of at least 0. Raises CheckpointError for another value."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"config.json: {key} must be a whole number of at least 0, got {value!r}.")
    return value


def read_epsilon(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number in [0, 1). Raises CheckpointError for another value."""
    value = config.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < 1):  # NaN is inside of nothing
        raise CheckpointError(f"config.json: {key} must be a number in [0, 1), got {value!r}.")
    return float(value)


def read_factor(value: Any, key: str) -> float | None:
    """A number above 0, or None. Raises CheckpointError naming the key for another value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):  # NaN is above of nothing
        raise CheckpointError(f"config.json: {key} must be a number above 0, got {value!r}.")
    return None if value is None else float(value)


def read_switch(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false. Raises CheckpointError for another value."""
    value = config.get(key)
    if value not in (None, True, False):
        raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}.")
    return default if value is None else bool(value)
