"""The Gemma 2 family: a window on every second layer, soft caps of scores and logits, norms before and behind each
block, and scaled embeddings. Source: Gemma 2 (arXiv 2408.00118), section 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.interfaces import ModelContext
from framework.layers.decoder import DecoderLayer, FeedForward, OutputNormLayer
from framework.layers.embedding import Embedding
from framework.layers.mlp import GatedMLP
from framework.layers.norm import Factor
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, Family
from framework_models.llama import Llama

HEAD_DIM = 256
ACTIVATION = ("hidden_activation", ("gelu_pytorch_tanh",))


def _slides(config: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


class Gemma2(Llama):
    """Gemma2ForCausalLM."""

    family: ClassVar[Family] = Family(
        knows=(
            "attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        head_dim=HEAD_DIM,
        tied=True,
        window=4096,
        slides=_slides,
        attention_cap=50.0,
        logit_cap=30.0,
        query_scalar=256.0,
        activation=ACTIVATION,
    )  # fmt: skip
    norm_factor: ClassVar[Factor] = "around_one"

    def embedding(self, ctx: ModelContext, dense: DenseConfig) -> Embedding:
        """Vectors times the root of their size, which is rounded to the model's dtype."""
        scale = dense.hidden_size**0.5
        return Embedding(ctx, "model.embed_tokens", dense.vocab_size, dense.hidden_size, scale=scale)

    def layer(self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None) -> DecoderLayer:
        """norm, attention, norm, norm, feed-forward, norm; the stream is joined behind each second norm."""
        prefix = f"model.layers.{index}"
        return OutputNormLayer(
            self.norm(ctx, dense, f"{prefix}.input_layernorm"),
            self.attention(ctx, dense, index, rotary),
            self.norm(ctx, dense, f"{prefix}.post_attention_layernorm"),
            self.norm(ctx, dense, f"{prefix}.pre_feedforward_layernorm"),
            self.feed_forward(ctx, dense, index),
            self.norm(ctx, dense, f"{prefix}.post_feedforward_layernorm"),
        )

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Gated by a GELU."""
        prefix, sizes = f"model.layers.{index}.mlp", (dense.hidden_size, dense.intermediate_size)
        return GatedMLP(ctx, prefix, *sizes, bias=False, activation="gelu_tanh")
