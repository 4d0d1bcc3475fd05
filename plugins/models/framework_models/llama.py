"""The Llama family (Llama 2 and 3, SmolLM2 and others that declare LlamaForCausalLM), assembled from framework.layers.

Reads top to bottom as the model: embedding, layers, final norm, head. Attention and products belong to the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from framework.interfaces import ForwardContext, ModelContext, ModelOutput
from framework.layers.attention import Attention
from framework.layers.decoder import AttentionBlock, DecoderLayer, DecoderStack, FeedForward
from framework.layers.embedding import Embedding, LMHead
from framework.layers.mlp import GatedMLP
from framework.layers.norm import Factor, RMSNorm
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, Family, read_dense, within_one_chunk


class Llama:
    """LlamaForCausalLM. A family that differs in its config, or in one of the parts below, is a subclass."""

    # Old checkpoints carry their frequencies, which are computed here.
    ignored_weights: ClassVar[tuple[str, ...]] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    family: ClassVar[Family] = Family(knows=("attention_bias", "mlp_bias"))
    norm_factor: ClassVar[Factor] = "rounded"

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        dense = self.read_config(within_one_chunk(config, ctx.max_model_len))
        self.vocab_size = dense.vocab_size
        self.embed_tokens = self.embedding(ctx, dense)
        layers = [self.layer(ctx, dense, i, rotary) for i, rotary in enumerate(rotaries(ctx, dense))]
        self.stack = DecoderStack(layers, self.norm(ctx, dense, "model.norm"))
        self.lm_head = LMHead(ctx, "lm_head", self.embed_tokens, tied=dense.tied, soft_cap=dense.logit_cap)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DenseConfig:
        """Sizes and switches. Raises CheckpointError for a key that changes the output and is not built."""
        return read_dense(config, cls.family)

    def embedding(self, ctx: ModelContext, dense: DenseConfig) -> Embedding:
        """Its embedding."""
        return Embedding(ctx, "model.embed_tokens", dense.vocab_size, dense.hidden_size)

    def norm(self, ctx: ModelContext, dense: DenseConfig, name: str) -> RMSNorm:
        """A norm of the stream, or of what joins it."""
        return RMSNorm(ctx, name, dense.hidden_size, dense.rms_norm_eps, self.norm_factor)

    def layer(self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None) -> DecoderLayer:
        """Layer `index` of the stack."""
        prefix = f"model.layers.{index}"
        return DecoderLayer(
            self.norm(ctx, dense, f"{prefix}.input_layernorm"),
            self.attention(ctx, dense, index, rotary),
            self.norm(ctx, dense, f"{prefix}.post_attention_layernorm"),
            self.feed_forward(ctx, dense, index),
        )

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        """Its attention; others: what a family asks of `Attention` beside the sizes."""
        return Attention(
            ctx,
            f"model.layers.{index}.self_attn",
            hidden_size=dense.hidden_size,
            num_heads=dense.num_heads,
            num_kv_heads=dense.num_kv_heads,
            head_dim=dense.head_dim,
            rotary=rotary,
            bias=dense.qkv_bias,
            out_bias=dense.out_bias,
            scale=dense.scale,
            window=dense.windows[index],
            softcap=dense.attention_cap,
            **others,
        )

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        """Its feed-forward block."""
        prefix = f"model.layers.{index}.mlp"
        return GatedMLP(ctx, prefix, dense.hidden_size, dense.intermediate_size, bias=dense.mlp_bias)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]."""
        return self.embed_tokens(input_ids)

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> ModelOutput:
        """x [T, hidden_size], positions [T]; The memory of x may be reused."""
        return self.stack.forward(x, positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden_size] -> [L, vocab_size]."""
        return self.lm_head(hidden)


def rotaries(ctx: ModelContext, dense: DenseConfig) -> Iterator[Rotary | None]:
    """How each layer rotates, None for not at all; layers that rotate alike share a table."""
    everywhere = Rotary(ctx, dense.rope, dense.head_dim)
    inside = everywhere if dense.window_rope is None else Rotary(ctx, dense.window_rope, dense.head_dim)
    for window, is_rotated in zip(dense.windows, dense.rotated, strict=True):
        yield (everywhere if window is None else inside) if is_rotated else None
