"""The dense OLMo 2 family: Llama whose blocks are normalised behind them and not in front, with norms over whole
queries and keys. Source: OLMo 2 (arXiv 2501.00656), section 2.1."""

from __future__ import annotations

from typing import Any, ClassVar

from framework.interfaces import ModelContext
from framework.layers.attention import QKNorm
from framework.layers.decoder import AttentionBlock, DecoderLayer, OutputNormLayer
from framework.layers.norm import Factor, NoNorm
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, Family
from framework_models.llama import Llama


class Olmo2(Llama):
    """Olmo2ForCausalLM."""

    family: ClassVar[Family] = Family(knows=("attention_bias",), eps=1e-5)
    norm_factor: ClassVar[Factor] = "wide"

    def layer(self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None) -> DecoderLayer:
        """attention, norm, feed-forward, norm; each norm before the block joins the stream."""
        prefix = f"model.layers.{index}"
        return OutputNormLayer(
            NoNorm(),
            self.attention(ctx, dense, index, rotary),
            self.norm(ctx, dense, f"{prefix}.post_attention_layernorm"),
            NoNorm(),
            self.feed_forward(ctx, dense, index),
            self.norm(ctx, dense, f"{prefix}.post_feedforward_layernorm"),
        )

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        """Llama's, with norms over all heads of a token."""
        norm = QKNorm(dense.rms_norm_eps, self.norm_factor, is_whole=True)
        return super().attention(ctx, dense, index, rotary, qk_norm=norm, **others)
