"""The gated feed-forward block of Llama-like decoders. Mixtures of experts are not here."""

from __future__ import annotations

from torch import Tensor

from framework.interfaces import ModelContext
from framework.layers.linear import load_linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    __slots__ = ("_down", "_gate_up", "_silu_and_mul")

    def __init__(self, ctx: ModelContext, prefix: str, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        both = [(f"{prefix}.gate_proj", intermediate_size), (f"{prefix}.up_proj", intermediate_size)]
        self._gate_up = load_linear(ctx, both, hidden_size, bias=bias)
        self._down = load_linear(ctx, [(f"{prefix}.down_proj", hidden_size)], intermediate_size, bias=bias)
        self._silu_and_mul = ctx.backend.layer_ops.silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        return self._down(self._silu_and_mul(self._gate_up(x)))
