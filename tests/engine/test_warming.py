"""The largest step before there is a KV cache: attention's memory is taken although attention is not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.engine.warming import NoAttention
from framework.interfaces import LatentUp, LayerSpec

LAYER = LayerSpec(0, "latent", 2, 1, 24, 1.0, value_dim=16)
Q, LATENT = torch.ones(3, 2, 20), torch.ones(3, 24)
UP = LatentUp(torch.ones(2, 12, 16), torch.ones(2, 10, 16))


class Wide:
    """Attention with a workspace of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.asked = num_bytes, []  # type: ignore[var-annotated]

    def workspace_bytes(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> int:
        self.asked.append((layer, q.shape, out.shape))
        return self.num_bytes


def test_attention_is_asked_for_the_workspace_of_the_queries_and_of_what_they_become() -> None:
    attention: Any = Wide(100)
    plan = NoAttention(attention, LAYER)
    assert torch.equal(plan.forward(0, Q, Q, Q), Q)
    assert torch.equal(plan.forward_latent(0, Q, LATENT, UP), torch.zeros(3, 2, 10))
    assert attention.asked == [(LAYER, (3, 2, 20), (3, 2, 20)), (LAYER, (3, 2, 20), (3, 2, 10))]


def test_a_workspace_is_taken() -> None:
    attention: Any = Wide(1 << 62)  # more than any machine has
    plan = NoAttention(attention, LAYER)
    with pytest.raises(RuntimeError, match="memory"):
        plan.forward(0, Q, Q, Q)
    with pytest.raises(RuntimeError, match="memory"):
        plan.forward_latent(0, Q, LATENT, UP)


def test_attention_without_a_workspace_takes_nothing() -> None:
    nothing: Any = object()
    assert torch.equal(NoAttention(nothing, LAYER).forward(0, Q, Q, Q), Q)
