"""The GPT-2 family: learnt positions, norms that subtract the mean, a plain feed-forward block, transposed weights.

Reads top to bottom as the model. Source: Language Models are Unsupervised Multitask Learners (Radford et al. 2019),
section 2.3, and its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from framework.errors import CheckpointError
from framework.interfaces import ForwardContext, ModelContext, ModelOutput
from framework.layers.attention import Attention
from framework.layers.decoder import DecoderLayer, DecoderStack
from framework.layers.embedding import Embedding, LMHead, PositionEmbedding
from framework.layers.linear import load_transposed
from framework.layers.mlp import PlainMLP
from framework.layers.norm import LayerNorm
from framework_models.dense import Family, read_epsilon, read_size, read_switch, read_windows, refuse_unknown

_ACTIVATION = ("activation_function", ("gelu_new", "gelu_pytorch_tanh"))


@dataclass(frozen=True)
class Gpt2Config:
    """Sizes and switches. scales: of attention scores, of each layer."""

    vocab_size: int
    num_positions: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    eps: float
    tied: bool
    scales: tuple[float, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Gpt2:
    """GPT2LMHeadModel."""

    # Causal masks that old checkpoints carry.
    ignored_weights: ClassVar[tuple[str, ...]] = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",)
    family: ClassVar[Family] = Family(knows=(), activation=_ACTIVATION)

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        sizes = self.read_config(config)
        # the first checkpoints were saved without the head, and without its prefix
        prefix = "transformer." if ctx.weights.has("transformer.wte.weight") else ""
        self.vocab_size = sizes.vocab_size
        self.embed_tokens = Embedding(ctx, f"{prefix}wte", sizes.vocab_size, sizes.hidden_size)
        self.embed_positions = PositionEmbedding(ctx, f"{prefix}wpe", sizes.num_positions, sizes.hidden_size)
        layers = [_layer(ctx, sizes, f"{prefix}h.{i}", scale) for i, scale in enumerate(sizes.scales)]
        self.stack = DecoderStack(layers, LayerNorm(ctx, f"{prefix}ln_f", sizes.hidden_size, sizes.eps))
        self.lm_head = LMHead(ctx, "lm_head", self.embed_tokens, tied=sizes.tied)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Gpt2Config:
        """Sizes and switches. Raises CheckpointError for a key that changes the output and is not built."""
        refuse_unknown(config, cls.family)
        read_windows(config, cls.family, read_size(config, "n_layer"))  # layers of another kind are refused there
        _refuse_cross_attention(config)
        hidden, heads = read_size(config, "n_embd"), read_size(config, "n_head")
        if hidden % heads:
            raise CheckpointError(f"config.json: n_embd={hidden} is no multiple of n_head={heads}. Correct it.")
        return Gpt2Config(
            vocab_size=read_size(config, "vocab_size"),
            num_positions=read_size(config, "n_positions"),
            hidden_size=hidden,
            intermediate_size=read_size(config, "n_inner", 4 * hidden),
            num_heads=heads,
            eps=read_epsilon(config, "layer_norm_epsilon", 1e-5),
            tied=read_switch(config, "tie_word_embeddings", True),
            scales=_scales(config, hidden // heads),
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]."""
        return self.embed_tokens(input_ids)

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> ModelOutput:
        """x [T, hidden_size], positions [T]; the memory of x may be reused."""
        return self.stack.forward(self.embed_positions(x, positions), positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden_size] -> [L, vocab_size]."""
        return self.lm_head(hidden)


def _layer(ctx: ModelContext, sizes: Gpt2Config, prefix: str, scale: float) -> DecoderLayer:
    hidden = sizes.hidden_size
    attention = Attention(
        ctx,
        f"{prefix}.attn",
        hidden_size=hidden,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        rotary=None,
        products=(
            load_transposed(ctx, f"{prefix}.attn.c_attn", 3 * hidden, hidden),
            load_transposed(ctx, f"{prefix}.attn.c_proj", hidden, hidden),
        ),
        scale=scale,
    )
    mlp = PlainMLP(ctx, f"{prefix}.mlp", hidden, sizes.intermediate_size)
    return DecoderLayer(
        LayerNorm(ctx, f"{prefix}.ln_1", hidden, sizes.eps),
        attention,
        LayerNorm(ctx, f"{prefix}.ln_2", hidden, sizes.eps),
        mlp,
    )


def _scales(config: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    base = head_dim**-0.5 if read_switch(config, "scale_attn_weights", True) else 1.0
    falls = read_switch(config, "scale_attn_by_inverse_layer_idx")
    return tuple(base / (layer + 1 if falls else 1) for layer in range(read_size(config, "n_layer")))


def _refuse_cross_attention(config: Mapping[str, Any]) -> None:
    if read_switch(config, "add_cross_attention"):
        raise CheckpointError(
            "config.json: add_cross_attention=true asks for an encoder, which is not built. Use another checkpoint."
        )
