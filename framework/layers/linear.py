"""Dense products out of a checkpoint: reads weights, stacks those that share an input, packs them for the device.

The product itself belongs to the backend (`Backend.pack_linear`). Called by the other layers and by models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.interfaces import Linear, ModelContext


def load_linear(ctx: ModelContext, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool) -> Linear:
    """One product [T, in] -> [T, sum of rows] for all `parts`, whose outputs stand side by side in the order given.

    parts  (name, rows): `name.weight` is [rows, in_features] in the checkpoint and, with `bias`, `name.bias` is [rows]
    Raises CheckpointError when a tensor is missing or of another shape.
    """
    weights = [ctx.weights.take(f"{name}.weight", (rows, in_features)) for name, rows in parts]
    biases = [ctx.weights.take(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
    return ctx.backend.pack_linear(_stack(weights), _stack(biases) if bias else None)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
