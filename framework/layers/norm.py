"""Root-mean-square normalisation with a learned weight. The arithmetic is the backend's `LayerOps`."""

from __future__ import annotations

from torch import Tensor

from framework.interfaces import ModelContext


class RMSNorm:
    """Normalises the last dimension; `add` does so after adding the residual, in one operation."""

    __slots__ = ("_add_rms_norm", "_rms_norm", "eps", "weight")

    def __init__(self, ctx: ModelContext, name: str, size: int, eps: float) -> None:
        self.weight = ctx.weights.take(f"{name}.weight", (size,))
        self.eps = eps
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
