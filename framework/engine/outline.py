"""A model built without its weights, to know which attention layers it declares before any weight is read.

Weights are tensors of torch's meta device, which have a shape and no memory; what else a constructor makes is small,
and made on the host. Called where parts are chosen; nothing that is built here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from framework.errors import FrameworkError, PluginError, first_line
from framework.interfaces import Checkpoint, ModelContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from framework.interfaces import Backend, ExpertWeights, LayerSpec, Routing


def layers_of(
    name: str, target: Any, checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int
) -> list[LayerSpec]:
    """The attention layers that model `name`, built as target(config, ModelContext), declares for the checkpoint.

    Raises what the model raises of its configuration, and PluginError for one that cannot be built without weights.
    """
    import torch

    from framework.engine.outline_shapes import ShapesAlone

    meta = torch.device("meta")
    ctx = ModelContext(cast("Backend", _NoBackend(dtype)), _NoWeights(dtype), dtype, meta, max_model_len)
    try:
        with ShapesAlone():
            target(checkpoint.config, ctx)
    except FrameworkError:
        raise
    except Exception as error:
        raise PluginError(
            f"model={name} cannot be built without its weights ({type(error).__name__}: {first_line(error)}). Its "
            "constructor must do with tensors of the meta device: it may look at shapes and at no value"
        ) from error
    return ctx.layers


class _NoWeights:
    """`interfaces.WeightSource` that has every tensor, of the shape that it is asked for, and no value."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=dtype or self._dtype, device="meta")

    def unused(self) -> list[str]:
        return []

    def close(self) -> None:
        """Holds nothing."""


class _Shapes:
    """Stands for a packed product or mixture of experts: it is kept, and never called."""


class _NoBackend:
    """What the layers ask of `interfaces.Backend` while they are built."""

    name = "none"

    def __init__(self, dtype: torch.dtype) -> None:
        import torch

        from framework.layers import ops

        self.device, self.dtype, self.layer_ops = torch.device("meta"), dtype, ops

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> _Shapes:
        return _Shapes()

    def pack_experts(self, weights: ExpertWeights, routing: Routing) -> _Shapes:
        return _Shapes()
