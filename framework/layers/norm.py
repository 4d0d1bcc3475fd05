"""The norms in front of blocks and behind them. The arithmetic is the backend's `LayerOps`.

Each can add the residual stream in the same operation. Which of them a block has is the model's to say.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from framework.interfaces import ModelContext

Factor = Literal["rounded", "wide", "around_one"]


class Norm(Protocol):
    """What stands in front of a block.

    fusable  the norm as a backend's product takes it into its launch (`interfaces.FusesNorm`), None for another one
    """

    @property
    def fusable(self) -> RMSNorm | None: ...

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the memory of both arguments may be reused. None: x is the sum."""


class RMSNorm:
    """Normalises the last dimension; `add` does so after adding the residual, in one operation.

    factor  "rounded": the weight is of the model's dtype, and so is what it multiplies (Llama). "wide": the weight is
            kept in float32, and the product is rounded once (OLMo 2). "around_one": the same of 1 + weight (Gemma)
    """

    __slots__ = ("_add_rms_norm", "_rms_norm", "eps", "fusable", "weight")

    def __init__(self, ctx: ModelContext, name: str, size: int, eps: float, factor: Factor = "rounded") -> None:
        self.weight = ctx.weights.take(f"{name}.weight", (size,), None if factor == "rounded" else torch.float32)
        if factor == "around_one":
            self.weight = self.weight + 1.0
        self.eps = eps
        self.fusable = self if factor == "rounded" else None
        self._rms_norm = ctx.backend.layer_ops.rms_norm
        self._add_rms_norm = ctx.backend.layer_ops.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]; x keeps its values."""
        return self._rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the memory of both arguments may be reused. None: x is the sum."""
        if residual is None:
            return self._rms_norm(x, self.weight, self.eps), x
        return self._add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """Subtracts the mean and divides by the deviation, with a weight and a bias."""

    __slots__ = ("_layer_norm", "bias", "eps", "weight")
    fusable = None

    def __init__(self, ctx: ModelContext, name: str, size: int, eps: float) -> None:
        self.weight, self.bias = (ctx.weights.take(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
        self.eps = eps
        self._layer_norm = ctx.backend.layer_ops.layer_norm

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). None: x is the sum."""
        total = x if residual is None else x + residual
        return self._layer_norm(total, self.weight, self.bias, self.eps), total


class NoNorm:
    """In front of a block that takes the stream as it is."""

    __slots__ = ()
    fusable = None

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum, twice: both are the same memory."""
        total = x if residual is None else x + residual
        return total, total
