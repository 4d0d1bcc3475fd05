"""The OLMoE family: a mixture of experts in every layer, and norms over whole projections of queries and keys.
Source: OLMoE (arXiv 2409.02060), section 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.interfaces import ModelContext
from framework.layers.attention import QKNorm
from framework.layers.decoder import AttentionBlock, FeedForward
from framework.layers.moe import SparseMLP, load_experts
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, Family, read_switch
from framework_models.llama import Llama
from framework_models.mixtures import read_mixture


class Olmoe(Llama):
    """OlmoeForCausalLM."""

    family: ClassVar[Family] = Family(knows=("attention_bias", "num_experts"), eps=1e-5)

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        normalizes = read_switch(config, "norm_topk_prob")
        self.mixture = read_mixture(config, count=("num_experts",), width="intermediate_size", normalizes=normalizes)
        super().__init__(config, ctx)

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        """Llama's, with norms over all heads together."""
        norm = QKNorm(dense.rms_norm_eps, is_whole=True)
        return super().attention(ctx, dense, index, rotary, qk_norm=norm, **others)

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Experts alone."""
        mixture, prefix = self.mixture, f"model.layers.{index}.mlp"
        weights = load_experts(ctx, f"{prefix}.experts", mixture.num_experts, dense.hidden_size, mixture.width)
        return SparseMLP(ctx, prefix, weights, mixture.routing)
