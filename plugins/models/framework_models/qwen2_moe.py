"""The sparse Qwen2 family (Qwen1.5-MoE and Qwen2-57B-A14B): Qwen2 with mixtures of experts beside one that every token
uses, times a gate of its own. Source: Qwen2 (arXiv 2407.10671), section 2.2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from framework.interfaces import ModelContext
from framework.layers.decoder import FeedForward
from framework.layers.moe import SharedExperts, SparseMLP, load_experts
from framework_models.dense import DenseConfig, Family, read_count, read_dense, read_size, read_switch
from framework_models.llama import Llama
from framework_models.mixtures import read_mixture
from framework_models.qwen2 import WINDOW_KEYS


def slides_alternately(config: Mapping[str, Any], layer: int) -> bool:
    """Every other layer from the first on has the window, below `max_window_layers`."""
    return layer % 2 == 0 and layer < read_count(config, "max_window_layers", 28)


class Qwen2Moe(Llama):
    """Qwen2MoeForCausalLM."""

    family: ClassVar[Family] = Family(knows=(*WINDOW_KEYS, "num_experts"), window=4096, slides=slides_alternately)

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        normalizes = read_switch(config, "norm_topk_prob")
        self.mixture = read_mixture(
            config, count=("num_experts",), width="moe_intermediate_size", normalizes=normalizes
        )
        self.shared_width = read_size(config, "shared_expert_intermediate_size")
        super().__init__(config, ctx)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DenseConfig:
        """As Llama's, with biases of queries, keys and values unless `qkv_bias` is false."""
        return replace(read_dense(config, cls.family), qkv_bias=read_switch(config, "qkv_bias", True))

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Llama's in layers without experts."""
        mixture, size, prefix = self.mixture, dense.hidden_size, f"model.layers.{index}.mlp"
        if index in mixture.dense:
            return super().feed_forward(ctx, dense, index)
        weights = load_experts(ctx, f"{prefix}.experts", mixture.num_experts, size, mixture.width)
        gate = f"{prefix}.shared_expert_gate"
        shared = SharedExperts(ctx, f"{prefix}.shared_expert", size, self.shared_width, gate)
        return SparseMLP(ctx, prefix, weights, mixture.routing, shared=shared)
