"""The sparse Qwen3 family: Qwen3 with mixtures of experts. Source: Qwen3 (arXiv 2505.09388), section 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.interfaces import ModelContext
from framework.layers.decoder import FeedForward
from framework.layers.moe import SparseMLP, load_experts
from framework_models.dense import DenseConfig, Family, read_switch
from framework_models.mixtures import read_mixture
from framework_models.qwen3 import Qwen3

EXPERT_KEYS = ("num_experts", "num_local_experts")  # the same, as published and as transformers 5 saves it


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM."""

    family: ClassVar[Family] = Family(
        knows=("attention_bias", "use_qk_norm", "sliding_window", "use_sliding_window", *EXPERT_KEYS), window=4096
    )

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        normalizes = read_switch(config, "norm_topk_prob")
        self.mixture = read_mixture(config, count=EXPERT_KEYS, width="moe_intermediate_size", normalizes=normalizes)
        super().__init__(config, ctx)

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Llama's in layers without experts."""
        mixture, prefix = self.mixture, f"model.layers.{index}.mlp"
        if index in mixture.dense:
            return super().feed_forward(ctx, dense, index)
        weights = load_experts(ctx, f"{prefix}.experts", mixture.num_experts, dense.hidden_size, mixture.width)
        return SparseMLP(ctx, prefix, weights, mixture.routing)
