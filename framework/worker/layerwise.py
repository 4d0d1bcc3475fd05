"""A KV connector around the layers of a step: each layer's KV is there before it is read, and may be sent behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from framework.interfaces import KVConnector, LatentUp


class LayerwisePlan:
    """`interfaces.AttentionPlan` or `LatentPlan` that asks a layerwise connector before and after each layer."""

    def __init__(self, plan: Any, connector: KVConnector) -> None:
        self._plan, self._connector = plan, connector

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._around(layer, self._plan.forward, q, k, v)

    def forward_latent(self, layer: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        return self._around(layer, self._plan.forward_latent, q, latent, up)

    def _around(self, layer: int, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        self._connector.wait_layer(layer)
        out = forward(layer, *args)
        self._connector.save_layer(layer)
        return out
