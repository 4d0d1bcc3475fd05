"""The Llama family (Llama 2 and 3, SmolLM2 and others that declare LlamaForCausalLM), assembled from framework.layers.

Reads top to bottom as the model: embedding, layers, final norm, head. Attention and products belong to the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from framework.interfaces import ForwardContext, ModelContext, ModelOutput
from framework.layers.attention import Attention
from framework.layers.decoder import DecoderLayer, DecoderStack
from framework.layers.embedding import Embedding, LMHead
from framework.layers.mlp import GatedMLP
from framework.layers.norm import RMSNorm
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, read_dense


class Llama:
    """LlamaForCausalLM. A family that differs by its config or its head norms is a subclass."""

    # Old checkpoints carry their frequencies, which are computed here.
    ignored_weights: ClassVar[tuple[str, ...]] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    has_head_norms: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        dense = self.read_config(config)
        self.vocab_size = dense.vocab_size
        self.embed_tokens = Embedding(ctx, "model.embed_tokens", dense.vocab_size, dense.hidden_size)
        rotary = Rotary(ctx, dense.rope, dense.head_dim)
        layers = [self._layer(ctx, dense, f"model.layers.{i}", rotary) for i in range(dense.num_layers)]
        self.stack = DecoderStack(layers, RMSNorm(ctx, "model.norm", dense.hidden_size, dense.rms_norm_eps))
        self.lm_head = LMHead(ctx, "lm_head", self.embed_tokens, tied=dense.tied)

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DenseConfig:
        """Sizes and switches. Raises CheckpointError for a key that changes the output and is not built."""
        return read_dense(config, mlp_bias=True)

    def _layer(self, ctx: ModelContext, dense: DenseConfig, prefix: str, rotary: Rotary) -> DecoderLayer:
        eps, hidden = dense.rms_norm_eps, dense.hidden_size
        attention = Attention(
            ctx,
            f"{prefix}.self_attn",
            hidden_size=hidden,
            num_heads=dense.num_heads,
            num_kv_heads=dense.num_kv_heads,
            head_dim=dense.head_dim,
            rotary=rotary,
            bias=dense.attention_bias,
            qk_norm_eps=eps if self.has_head_norms else None,
        )
        return DecoderLayer(
            RMSNorm(ctx, f"{prefix}.input_layernorm", hidden, eps),
            attention,
            RMSNorm(ctx, f"{prefix}.post_attention_layernorm", hidden, eps),
            GatedMLP(ctx, f"{prefix}.mlp", hidden, dense.intermediate_size, bias=dense.mlp_bias),
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]."""
        return self.embed_tokens(input_ids)

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> ModelOutput:
        """x [T, hidden_size], positions [T]; The memory of x may be reused."""
        return self.stack.forward(x, positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden_size] -> [L, vocab_size]."""
        return self.lm_head(hidden)
