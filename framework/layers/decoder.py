"""A stack of decoder layers with the residual stream carried beside the hidden states.

The residual add of each block is fused with the norm that follows it, and with the product behind that where the
backend has one launch for all three. Models build the blocks and hand them over; embedding and head stay with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from framework.interfaces import ForwardContext, ModelOutput
from framework.layers.attention import ForwardPass
from framework.layers.norm import Norm, RMSNorm


class AttentionBlock(Protocol):
    """`layers.attention.Attention`, or another one in its place."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: Norm, step: ForwardPass, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class FeedForward(Protocol):
    """`layers.mlp.GatedMLP`, or a mixture of experts. num_tokens as in `ForwardContext`, of the tokens in x."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: Norm, num_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class DecoderLayer:
    """norm, attention, norm, feed-forward."""

    __slots__ = ("attention", "input_norm", "mlp", "post_norm")

    def __init__(self, input_norm: Norm, attention: AttentionBlock, post_norm: Norm, mlp: FeedForward) -> None:
        self.input_norm, self.attention, self.post_norm, self.mlp = input_norm, attention, post_norm, mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: ForwardPass, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block output, residual stream), both [T, H]; their sum is the layer's hidden state.

        residual is None in the first layer only, where x is the whole stream. wanted, in the last layer only: the [L]
        tokens whose states are read; both are [L, H] then.
        """
        x, residual = self.attention(x, residual, self.input_norm, step, wanted)
        return self.mlp(x, residual, self.post_norm, step.ctx.num_tokens if wanted is None else step.ctx.num_wanted)


class OutputNormLayer(DecoderLayer):
    """A layer whose blocks are normalised behind them as well, before they join the stream (Gemma 2), or only there,
    with `NoNorm` in front (OLMo 2)."""

    __slots__ = ("attention_out_norm", "mlp_out_norm")

    def __init__(
        self,
        input_norm: Norm,
        attention: AttentionBlock,
        attention_out_norm: RMSNorm,
        pre_mlp_norm: Norm,
        mlp: FeedForward,
        mlp_out_norm: RMSNorm,
    ) -> None:
        super().__init__(input_norm, attention, pre_mlp_norm, mlp)
        self.attention_out_norm, self.mlp_out_norm = attention_out_norm, mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: ForwardPass, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer`'s."""
        x, residual = self.attention(x, residual, self.input_norm, step, wanted)
        num_tokens = step.ctx.num_tokens if wanted is None else step.ctx.num_wanted
        x, residual = self.mlp(self.attention_out_norm(x), residual, self.post_norm, num_tokens)
        return self.mlp_out_norm(x), residual


class DecoderStack:
    """Layers followed by the final norm."""

    __slots__ = ("final_norm", "layers")

    def __init__(self, layers: Sequence[DecoderLayer], final_norm: Norm) -> None:
        assert layers, "a decoder needs at least one layer"
        self.layers, self.final_norm = list(layers), final_norm

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> ModelOutput:
        """x [T, H], positions [T] -> hidden [T, H] after the final norm, or [L, H] of the tokens that ctx.wanted names:
        nothing behind the last attention is computed for the others. The memory of x may be reused.

        ctx.feature_layers asks for the hidden state that enters a layer (0 .. L - 1), or leaves the last one before
        the final norm (L); features come in the order asked.
        """
        step = ForwardPass(positions, ctx)
        residual: Tensor | None = None
        features: dict[int, Tensor] = {}
        last = len(self.layers)
        wanted = None if last in ctx.feature_layers else ctx.wanted
        for i, layer in enumerate(self.layers):
            if i in ctx.feature_layers:
                features[i] = _stream(x, residual)
            x, residual = layer(x, residual, step, wanted if i + 1 == last else None)
        assert residual is not None
        if last in ctx.feature_layers:
            features[last] = _stream(x, residual)
        hidden, _ = self.final_norm.add(x, residual)
        return ModelOutput(hidden, tuple(features[i] for i in ctx.feature_layers))


def _stream(x: Tensor, residual: Tensor | None) -> Tensor:
    """The hidden state in memory of its own: the next fused add may overwrite both arguments."""
    return x.clone() if residual is None else x + residual
