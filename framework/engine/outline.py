"""A model built without its weights, to know which attention layers it declares before any weight is read.

Weights are tensors of torch's meta device, which have a shape and no memory; what else a constructor makes is small,
and made on the host. Which tensors there are is asked of the checkpoint itself: a model may be another one with a
tensor that some checkpoints lack. Called where parts are chosen; nothing that is built here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from framework.errors import FrameworkError, PluginError, first_line
from framework.interfaces import Checkpoint, ModelContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from framework.interfaces import Backend, ExpertWeights, LayerSpec, Loader, Routing, WeightSource

Has = Callable[[str], bool]
"""`WeightSource.has` of a checkpoint."""


@contextmanager
def names_of(checkpoint: Checkpoint, loader: Loader, backend: Backend) -> Iterator[Has]:
    """Whether the checkpoint has a tensor. Its files are opened when that is first asked, and none is read."""
    opened: list[WeightSource] = []

    def has(name: str) -> bool:
        if not opened:
            opened.append(loader.open(checkpoint, dtype=backend.dtype, device=backend.device, seed=0))
        return opened[0].has(name)

    try:
        yield has
    finally:
        for source in opened:
            source.close()


def layers_of(
    name: str, target: Any, checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int, has: Has
) -> list[LayerSpec]:
    """The attention layers that model `name`, built as target(config, ModelContext), declares for the checkpoint.

    has  which tensors there are
    Raises what the model raises of its configuration, what `has` raises, and PluginError for a model that cannot be
    built without weights.
    """
    import torch

    from framework.engine.outline_shapes import ShapesAlone

    meta = torch.device("meta")
    weights = _NoWeights(dtype, has)
    ctx = ModelContext(cast("Backend", _NoBackend(dtype)), weights, dtype, meta, max_model_len)
    try:
        with ShapesAlone():
            target(checkpoint.config, ctx)
    except FrameworkError:
        raise
    except Exception as error:
        if error is weights.fault:
            raise
        raise PluginError(
            f"model={name} cannot be built without its weights ({type(error).__name__}: {first_line(error)}). Its "
            "constructor must do with tensors of the meta device: it may look at shapes and at no value"
        ) from error
    if not ctx.layers:
        raise PluginError(
            f"model={name} declares no attention layer. Its constructor must declare each one (ModelContext.add_layer)"
        )
    return ctx.layers


class _NoWeights:
    """`interfaces.WeightSource` of tensors of the shape that it is asked for, without a value; which of them there are
    is not its own to say.

    fault  what was raised when that was asked, by a loader: it is none of the model's
    """

    def __init__(self, dtype: torch.dtype, has: Has) -> None:
        self._dtype, self._has = dtype, has
        self.fault: Exception | None = None

    def has(self, name: str) -> bool:
        try:
            return self._has(name)
        except Exception as error:
            self.fault = error
            raise

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
