"""The gpt-oss family: experts with biases and a clamped activation, sinks, and a window in every other layer. Source:
gpt-oss model card (arXiv 2508.10925), section 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.errors import CheckpointError
from framework.interfaces import ExpertWeights, ModelContext
from framework.layers.decoder import AttentionBlock, FeedForward
from framework.layers.experts import CLAMPED_GAIN
from framework.layers.moe import SparseMLP
from framework.layers.mxfp4 import take_mxfp4
from framework.layers.norm import Factor
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, Family, read_dense, read_factor
from framework_models.llama import Llama
from framework_models.mixtures import read_mixture

_THETA = 150000.0
_ROPE = {
    "rope_type": "yarn", "rope_theta": _THETA, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOss(Llama):
    """GptOssForCausalLM. Experts are in the model's dtype or in MXFP4, which is expanded when it is read."""

    norm_factor: ClassVar[Factor] = "wide"
    family: ClassVar[Family] = Family(
        knows=(
            "attention_bias", "sliding_window", "layer_types", "num_local_experts", "quantization_config",
            "swiglu_alpha", "swiglu_limit",
        ),
        head_dim=64,
        eps=1e-5,
        theta=_THETA,
        window=128,
        slides=lambda config, layer: layer % 2 == 0,
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        self.mixture = read_mixture(
            config, count=("num_local_experts",), width="intermediate_size", k=_K_KEYS, scores="selected"
        )
        self.limit = _read_limit(config)
        super().__init__(config, ctx)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DenseConfig:
        """As Llama's, with biases and YaRN where the config does not say."""
        quantization = config.get("quantization_config") or {}
        if not isinstance(quantization, Mapping):
            raise CheckpointError(f"config.json: quantization_config must be an object, got {quantization!r}.")
        method = quantization.get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise CheckpointError(
                f"config.json: quantization_config.quant_method={method!r} is not built yet, mxfp4 is. Use a "
                "checkpoint in mxfp4, or one that is not quantised."
            )
        rope = {} if config.get("rope_scaling") or config.get("rope_parameters") else {"rope_parameters": _ROPE}
        return read_dense({"attention_bias": True, **config, **rope}, cls.family)

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        """Llama's, with a sink a head."""
        sinks = ctx.weights.take(f"model.layers.{index}.self_attn.sinks", (dense.num_heads,))
        return super().attention(ctx, dense, index, rotary, sinks=sinks, **others)

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Experts alone."""
        prefix, mixture = f"model.layers.{index}.mlp", self.mixture
        weights = _load_experts(
            ctx, f"{prefix}.experts", mixture.num_experts, dense.hidden_size, mixture.width, self.limit
        )
        return SparseMLP(ctx, prefix, weights, mixture.routing, router="router", router_bias=True)


_K_KEYS = ("num_experts_per_tok", "experts_per_token")


def _read_limit(config: Mapping[str, Any]) -> float:
    gain = config.get("swiglu_alpha")
    if gain not in (None, CLAMPED_GAIN):
        raise CheckpointError(
            f"config.json: swiglu_alpha={gain!r} is not built yet, {CLAMPED_GAIN} is. Use a checkpoint without it."
        )
    return read_factor(config.get("swiglu_limit"), "swiglu_limit") or 7.0


def _load_experts(
    ctx: ModelContext, prefix: str, num_experts: int, size: int, width: int, limit: float
) -> ExpertWeights:
    """Rows of gates and inputs take turns in the checkpoint; here gates stand first."""
    gate_up = _matrices(ctx, f"{prefix}.gate_up_proj", (num_experts, 2 * width, size))
    down = _matrices(ctx, f"{prefix}.down_proj", (num_experts, size, width))
    biases = ctx.weights.take(f"{prefix}.gate_up_proj_bias", (num_experts, 2 * width))
    down_bias = ctx.weights.take(f"{prefix}.down_proj_bias", (num_experts, size))
    return ExpertWeights(_apart(gate_up), down.contiguous(), _apart(biases), down_bias, "clamped", limit)


def _matrices(ctx: ModelContext, name: str, shape: tuple[int, int, int]) -> Tensor:
    """[E, out, in]. Unquantised ones are stored with the input first, quantised ones are not."""
    if not ctx.weights.has(name) and ctx.weights.has(f"{name}_blocks"):
        return take_mxfp4(ctx, name, shape)
    num_experts, rows, columns = shape
    return ctx.weights.take(name, (num_experts, columns, rows)).transpose(1, 2)


def _apart(rows: Tensor) -> Tensor:
    """[E, 2 I, ...] with even rows first, then odd ones."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
