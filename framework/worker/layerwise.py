"""A KV connector around the layers of a step: each layer's KV is there before it is read, and may be sent behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from framework.interfaces import AttentionPlan, KVConnector


class LayerwisePlan:
    """`interfaces.AttentionPlan` that asks a layerwise connector before and after each layer."""

    def __init__(self, plan: AttentionPlan, connector: KVConnector) -> None:
        self._plan, self._connector = plan, connector

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._connector.wait_layer(layer)
        out = self._plan.forward(layer, q, k, v)
        self._connector.save_layer(layer)
        return out
