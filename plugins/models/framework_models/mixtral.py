"""The Mixtral family: Mistral with a mixture of experts in every layer. Source: Mixtral (arXiv 2401.04088), section
2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.interfaces import ModelContext
from framework.layers.decoder import FeedForward
from framework.layers.moe import SparseMLP, load_experts
from framework_models.dense import DenseConfig, Family
from framework_models.llama import Llama
from framework_models.mixtures import read_mixture


class Mixtral(Llama):
    """MixtralForCausalLM."""

    family: ClassVar[Family] = Family(knows=("sliding_window", "num_local_experts"), eps=1e-5, theta=1e6)

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        self.mixture = read_mixture(config, count=("num_local_experts",), width="intermediate_size", normalizes=True)
        super().__init__(config, ctx)

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Experts with a gate w1, an input w3 and an output w2, or fused ones under the names they have in memory."""
        mixture, prefix = self.mixture, f"model.layers.{index}.block_sparse_moe"
        if not ctx.weights.has(f"{prefix}.gate.weight"):
            prefix = f"model.layers.{index}.mlp"
        sizes, names = (mixture.num_experts, dense.hidden_size, mixture.width), ("w1", "w3", "w2")
        return SparseMLP(ctx, prefix, load_experts(ctx, f"{prefix}.experts", *sizes, names), mixture.routing)
