"""Dense products out of a checkpoint: reads weights, stacks those that share an input, packs them for the device.

The product itself belongs to the backend (`Backend.pack_linear`), and so does what it takes into its launch
(`FusesNorm`); what it does not take is composed here. Called by the other layers and by models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from framework.interfaces import FusesNorm, Linear, ModelContext
from framework.layers.norm import Norm

_SERIAL_VALUES = 32_000  # torch runs an operation of fewer than 32,768 values on the calling thread
_MAX_PIECES = 256


def load_linear(
    ctx: ModelContext,
    parts: Sequence[tuple[str, int]],
    in_features: int,
    *,
    bias: bool,
    reorder: Callable[[Tensor], Tensor] | None = None,
) -> Linear:
    """One product [T, in] -> [T, sum of rows] for all `parts`, whose outputs stand side by side in the order given.

    parts    (name, rows): `name.weight` is [rows, in_features] in the checkpoint; with `bias`, `name.bias` is [rows]
    reorder  permutes the rows [sum of rows, ...] of all parts together, of the weight and of the bias
    Raises CheckpointError when a tensor is missing or of another shape.
    """
    weight = stack_rows([ctx.weights.take(f"{name}.weight", (rows, in_features)) for name, rows in parts])
    biases = stack_rows([ctx.weights.take(f"{name}.bias", (rows,)) for name, rows in parts]) if bias else None
    if reorder is not None:
        weight, biases = reorder(weight), None if biases is None else reorder(biases)
    return ctx.backend.pack_linear(weight, biases)


def load_transposed(ctx: ModelContext, name: str, out_features: int, in_features: int) -> Linear:
    """A product with bias whose `name.weight` is [in_features, out_features] in the checkpoint."""
    weight = ctx.weights.take(f"{name}.weight", (in_features, out_features))
    return ctx.backend.pack_linear(weight.t().contiguous(), ctx.weights.take(f"{name}.bias", (out_features,)))


def stack_rows(tensors: list[Tensor]) -> Tensor:
    """The tensors below each other, [sum of rows, ...]; one that is alone is given back itself.

    Copied in pieces that torch does not split over threads (at most 256 of them): on a busy host, waking the threads
    once a layer took seconds for a small model, the copies themselves a tenth of one.
    """
    if len(tensors) == 1:
        return tensors[0]
    first, total = tensors[0], sum(len(t) for t in tensors)
    out = first.new_empty((total, *first.shape[1:]))
    if out.is_meta:  # of an outline: as many pieces take a second
        return out
    rows = max(_SERIAL_VALUES // max(first[0].numel(), 1), -(-total // _MAX_PIECES), 1)
    for target, source in zip(out.split([len(t) for t in tensors]), tensors, strict=True):
        for low in range(0, len(source), rows):
            target[low : low + rows].copy_(source[low : low + rows])
    return out


class NormedLinear:
    """A product and the norm in front of it: one operation where the backend's product offers it and the norm is one of
    those that it takes (`Norm.fusable`), else one after the other. All forms return the residual stream beside the
    product; residual None: x is the whole stream."""

    __slots__ = ("_fused", "_product", "_silu_and_mul")

    def __init__(self, ctx: ModelContext, product: Linear) -> None:
        self._fused = product if isinstance(product, FusesNorm) else None
        self._product, self._silu_and_mul = product, ctx.backend.layer_ops.silu_and_mul

    def after_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """(product of norm(x + residual), x + residual); the memory of both arguments may be reused."""
        taken = norm.fusable
        if taken is not None and self._fused is not None:
            return self._fused.after_norm(x, residual, taken.weight, taken.eps)
        x, residual = norm.add(x, residual)
        return self._product(x), residual

    def gated_after_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """(silu(first half) * second half of that product, x + residual), as `after_norm`."""
        taken = norm.fusable
        if taken is not None and self._fused is not None:
            return self._fused.gated_after_norm(x, residual, taken.weight, taken.eps)
        x, residual = norm.add(x, residual)
        return self._silu_and_mul(self._product(x)), residual
