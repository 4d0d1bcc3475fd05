"""The norms in front of blocks and behind them. The arithmetic is the backend's `LayerOps`.

Each can add the residual stream in the same operation. Which of them a block has is the model's to say.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from framework.interfaces import ModelContext


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

    around_one  the checkpoint's weight is the factor less 1, and the factor is kept in float32: the product is rounded
                once, as the Gemma families do (arXiv 2403.08295)
    """

    __slots__ = ("_add_rms_norm", "_rms_norm", "eps", "fusable", "weight")

    def __init__(self, ctx: ModelContext, name: str, size: int, eps: float, *, around_one: bool = False) -> None:
        dtype = torch.float32 if around_one else None
        self.weight = ctx.weights.take(f"{name}.weight", (size,), dtype)
        if around_one:
            self.weight = self.weight + 1.0
        self.eps = eps
        self.fusable = None if around_one else self
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
