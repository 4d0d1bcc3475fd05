"""The text model of the Gemma 3 family: Gemma 2 without caps of scores, with norms of heads, a window on five layers in
six, and another rotation inside windows. Source: Gemma 3 (arXiv 2503.19786), section 2.

Of a checkpoint that sees images too, the text model is served, and the rest of it left unread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.errors import CheckpointError
from framework.interfaces import ModelContext, WeightSource
from framework.layers.attention import QKNorm
from framework.layers.decoder import AttentionBlock
from framework.layers.nested import NESTED, text_config
from framework.layers.rope import RopeConfig, Rotary, read_rope
from framework_models.dense import DenseConfig, Family, read_dense, read_size
from framework_models.gemma2 import ACTIVATION, HEAD_DIM, Gemma2

_THETA, _WINDOW_THETA = 1_000_000.0, 10_000.0
_SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}  # of a text_config that has none
_PATTERN = 6  # every so many layers one has no window, where config.json does not say


def _slides(config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % read_size(config, "sliding_window_pattern", _PATTERN) != 0


class Gemma3(Gemma2):
    """Gemma3ForCausalLM."""

    family: ClassVar[Family] = Family(
        knows=(
            "attention_bias", "sliding_window", "sliding_window_pattern", "layer_types", "query_pre_attn_scalar",
            "final_logit_softcapping", "rope_local_base_freq",
        ),
        head_dim=HEAD_DIM,
        tied=True,
        window=4096,
        slides=_slides,
        query_scalar=256.0,
        activation=ACTIVATION,
    )  # fmt: skip

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DenseConfig:
        """As Gemma 2's, with the rotation inside windows beside the other one."""
        everywhere = read_rope(config, layer_type="full_attention", theta=_THETA)
        return replace(read_dense(config, cls.family, rope=everywhere), window_rope=_window_rope(config))

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        """Gemma 2's, with norms of heads."""
        norm = QKNorm(dense.rms_norm_eps, self.norm_factor)
        return super().attention(ctx, dense, index, rotary, qk_norm=norm, **others)


class Gemma3ForImages(Gemma3):
    """Gemma3ForConditionalGeneration: its text model."""

    ignored_weights: ClassVar[tuple[str, ...]] = (r"(vision_tower|multi_modal_projector)\..*",)

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        super().__init__(_text_config(config), replace(ctx, weights=_TextWeights(ctx.weights)))


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get(NESTED)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: {NESTED} must be an object with the text model's keys, got {text!r}.")
    return {**_SIZES, **text_config(config)}


class _TextWeights:
    """`interfaces.WeightSource` of a text model that stands beside others."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self.unused, self.close = weights.unused, weights.close

    def has(self, name: str) -> bool:
        return self._weights.has(f"language_model.{name}")

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.take(f"language_model.{name}", shape, dtype)


def _window_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Of layers with a window: their own rope_parameters, or plain frequencies of the older key."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get("sliding_attention"), Mapping):
        return read_rope(config, layer_type="sliding_attention", theta=_WINDOW_THETA)
    theta = config.get("rope_local_base_freq")
    return read_rope({"rope_theta": _WINDOW_THETA if theta is None else theta})
