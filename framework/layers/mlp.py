"""Feed-forward blocks of decoders: gated, and plain. Mixtures of experts are not here."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from framework.interfaces import ModelContext
from framework.layers.linear import NormedLinear, load_linear, load_transposed
from framework.layers.norm import Norm


class GatedMLP:
    """down(act(gate(x)) * up(x)) of a normalised x, with gate and up as one product.

    activation  "silu", which a product may take into its launch, or "gelu_tanh"
    is_fused    the checkpoint has gate and up as one tensor, `gate_up_proj`, the gate's rows first
    """

    __slots__ = ("_down", "_gate_up", "_gelu_and_mul")

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: Literal["silu", "gelu_tanh"] = "silu",
        is_fused: bool = False,
    ) -> None:
        both = [(f"{prefix}.gate_proj", intermediate_size), (f"{prefix}.up_proj", intermediate_size)]
        if is_fused:
            both = [(f"{prefix}.gate_up_proj", 2 * intermediate_size)]
        self._gate_up = NormedLinear(ctx, load_linear(ctx, both, hidden_size, bias=bias))
        self._down = load_linear(ctx, [(f"{prefix}.down_proj", hidden_size)], intermediate_size, bias=bias)
        self._gelu_and_mul = ctx.backend.layer_ops.gelu_tanh_and_mul if activation == "gelu_tanh" else None

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: Norm, num_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block of norm(x + residual), x + residual), both [T, hidden_size]; the arguments' memory may be reused."""
        if self._gelu_and_mul is None:
            gated, residual = self._gate_up.gated_after_norm(x, residual, norm)
        else:
            product, residual = self._gate_up.after_norm(x, residual, norm)
            gated = self._gelu_and_mul(product)
        return self._down(gated), residual


class PlainMLP:
    """down(gelu_tanh(up(x))) of a normalised x, with biases, in GPT-2's names and its transposed weights."""

    __slots__ = ("_down", "_gelu", "_up")

    def __init__(self, ctx: ModelContext, prefix: str, hidden_size: int, intermediate_size: int) -> None:
        self._up = NormedLinear(ctx, load_transposed(ctx, f"{prefix}.c_fc", intermediate_size, hidden_size))
        self._down = load_transposed(ctx, f"{prefix}.c_proj", hidden_size, intermediate_size)
        self._gelu = ctx.backend.layer_ops.gelu_tanh

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: Norm, num_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block of norm(x + residual), x + residual), both [T, hidden_size]."""
        product, residual = self._up.after_norm(x, residual, norm)
        return self._down(self._gelu(product)), residual
