"""The sparse feed-forward block: a router in float32, the backend's mixture of experts, experts that all tokens use.

Which experts a token gets and how they are summed is `interfaces.Experts`; its torch reference is `layers.experts`.
Families hand over their routing and the weights, in whichever layout the checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from framework.interfaces import AddsBeside, ExpertWeights, Gates, Linear, ModelContext, Routing, Widens
from framework.layers.experts import sigmoid
from framework.layers.linear import load_linear
from framework.layers.norm import Norm

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def load_experts(
    ctx: ModelContext,
    prefix: str,
    num_experts: int,
    hidden_size: int,
    width: int,
    names: tuple[str, str, str] = PROJECTIONS,
) -> ExpertWeights:
    """Experts of `width` I: fused tensors `prefix.gate_up_proj` [E, 2 I, H] and `prefix.down_proj` [E, H, I] where the
    checkpoint has them, else `prefix.{e}.{name}.weight` of each expert. names: of gate, up and down in the latter.

    Raises CheckpointError when a tensor is missing or of another shape.
    """
    up, down = (num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width)
    if ctx.weights.has(f"{prefix}.gate_up_proj"):
        return ExpertWeights(
            ctx.weights.take(f"{prefix}.gate_up_proj", up), ctx.weights.take(f"{prefix}.down_proj", down)
        )
    first, second, third = names
    return ExpertWeights(
        _fused(ctx, prefix, up, (first, second)),
        _fused(ctx, prefix, down, (third,)),
    )


def _fused(ctx: ModelContext, prefix: str, shape: tuple[int, int, int], names: tuple[str, ...]) -> Tensor:
    """[E, rows, columns] of each expert's tensors, those of `names` below each other."""
    num_experts, rows, columns = shape
    fused = None
    for expert in range(num_experts):
        for place, name in enumerate(names):
            part = ctx.weights.take(f"{prefix}.{expert}.{name}.weight", (rows // len(names), columns))
            if fused is None:
                fused = part.new_empty(shape)
            fused[expert, place * len(part) : (place + 1) * len(part)] = part
    assert fused is not None, "a mixture of no experts"
    return fused


class SharedExperts:
    """Experts that every token uses, one feed-forward block of their common width, without a norm of its own.

    gate  name of a product [H] -> 1 whose sigmoid multiplies the output (Qwen2-MoE), None for none (DeepSeek)
    """

    __slots__ = ("_down", "_gate", "_gated")

    def __init__(self, ctx: ModelContext, prefix: str, hidden_size: int, width: int, gate: str | None = None) -> None:
        gate_name, up_name, down_name = (f"{prefix}.{name}" for name in PROJECTIONS)
        gate_up = load_linear(ctx, [(gate_name, width), (up_name, width)], hidden_size, bias=False)
        self._gated = gating(gate_up, ctx.backend.layer_ops.silu_and_mul)
        self._down = load_linear(ctx, [(down_name, hidden_size)], width, bias=False)
        self._gate = None if gate is None else load_linear(ctx, [(gate, 1)], hidden_size, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        out = self._down(self._gated(x))
        return out if self._gate is None else out * sigmoid(self._gate(x).float()).to(x.dtype)


def gating(product: Linear, silu_and_mul: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """silu_and_mul of a product: in one launch, where the backend has that."""
    return product.gated if isinstance(product, Gates) else lambda x: silu_and_mul(product(x))


def widening(product: Linear) -> Callable[[Tensor], Tensor]:
    """A float32 product of x in any dtype: in one launch, where the backend has that."""
    return product.widened if isinstance(product, Widens) else lambda x: product(x.float())


class SparseMLP:
    """`layers.decoder.FeedForward` in which each token uses a few of many experts.

    prefix   of the block; its counts are known to the engine by this name
    router   `prefix.router.weight` [E, H] is read in float32 and, with `router_bias`, `.bias` [E]: in less, other
             experts would be chosen
    shared   what every token uses beside them
    """

    __slots__ = ("_adds", "_experts", "_router", "_shared")

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        weights: ExpertWeights,
        routing: Routing,
        *,
        router: str = "gate",
        router_bias: bool = False,
        shared: SharedExperts | None = None,
    ) -> None:
        num_experts, hidden_size, _ = weights.down.shape
        name, wide = f"{prefix}.{router}", torch.float32
        weight = ctx.weights.take(f"{name}.weight", (num_experts, hidden_size), wide)
        bias = ctx.weights.take(f"{name}.bias", (num_experts,), wide) if router_bias else None
        self._router = widening(ctx.backend.pack_linear(weight, bias))
        self._experts = ctx.add_experts(prefix, weights, routing)
        self._adds = self._experts if isinstance(self._experts, AddsBeside) else None
        self._shared = shared

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: Norm, num_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block of norm(x + residual), x + residual), both [T, H]; the arguments' memory may be reused."""
        x, residual = norm.add(x, residual)
        logits = self._router(x)
        if self._shared is None:
            return self._experts(x, logits, num_tokens), residual
        if self._adds is not None:
            return self._adds.beside(self._shared(x), x, logits, num_tokens), residual
        return self._experts(x, logits, num_tokens) + self._shared(x), residual
