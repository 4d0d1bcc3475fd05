"""The dense Phi-3 family (Phi-3, 3.5 and 4 that declare Phi3ForCausalLM): Llama with fused tensors in the checkpoint,
long rotary factors, part of a head rotated in some, and a window on every layer in others.

Source: Phi-3 (arXiv 2404.14219), section 2, and its configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.interfaces import ModelContext
from framework.layers.decoder import AttentionBlock, FeedForward
from framework.layers.mlp import GatedMLP
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, Family, read_dense
from framework_models.llama import Llama

_OLD_NAMES = ("su", "yarn")  # of the same factors, in its first configs
_ORIGINAL_LENGTH = 4096  # where config.json has none


class Phi3(Llama):
    """Phi3ForCausalLM."""

    family: ClassVar[Family] = Family(knows=("partial_rotary_factor", "sliding_window"), eps=1e-5)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DenseConfig:
        """As Llama's, with its own words for the rotary part."""
        length = config.get("original_max_position_embeddings") or _ORIGINAL_LENGTH
        renamed = {key: _renamed(config.get(key)) for key in ("rope_scaling", "rope_parameters")}
        return read_dense({**config, **renamed, "original_max_position_embeddings": length}, cls.family)

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        """Llama's, out of one tensor."""
        return super().attention(ctx, dense, index, rotary, is_fused=True, **others)

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Llama's, with gate and up out of one tensor."""
        prefix = f"model.layers.{index}.mlp"
        return GatedMLP(ctx, prefix, dense.hidden_size, dense.intermediate_size, bias=False, is_fused=True)


def _renamed(rope: Any) -> Any:
    """rope_scaling or rope_parameters with the name that the type has now."""
    if not isinstance(rope, Mapping):
        return rope
    return {k: "longrope" if k in ("type", "rope_type") and v in _OLD_NAMES else v for k, v in rope.items()}
