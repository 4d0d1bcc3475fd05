"""The gated feed-forward block of Llama-like decoders. Mixtures of experts are not here."""

from __future__ import annotations

from torch import Tensor

from framework.interfaces import ModelContext
from framework.layers.linear import NormedLinear, load_linear
from framework.layers.norm import RMSNorm


class GatedMLP:
    """down(silu(gate(x)) * up(x)) of a normalised x, with gate and up as one product."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, ctx: ModelContext, prefix: str, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        both = [(f"{prefix}.gate_proj", intermediate_size), (f"{prefix}.up_proj", intermediate_size)]
        self._gate_up = NormedLinear(ctx, load_linear(ctx, both, hidden_size, bias=bias))
        self._down = load_linear(ctx, [(f"{prefix}.down_proj", hidden_size)], intermediate_size, bias=bias)

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: RMSNorm, num_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block of norm(x + residual), x + residual), both [T, hidden_size]; the arguments' memory may be reused."""
        gated, residual = self._gate_up.gated_after_norm(x, residual, norm)
        return self._down(gated), residual
