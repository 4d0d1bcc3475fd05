"""Layers hand work to backends and plans that take it, and compose the plain operations for those that do not."""

from types import SimpleNamespace

import pytest
import torch

from framework.interfaces import ForwardContext, ModelContext
from framework.layers import ops
from framework_loaders.dummy import DummySource
from framework_models.gemma2 import Gemma2
from framework_models.gemma3 import Gemma3
from framework_models.llama import Llama
from framework_models.olmo2 import Olmo2
from framework_models.qwen3 import Qwen3

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


class PlainLinear:
    """A product that takes nothing beside it."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def __call__(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class FusingLinear(PlainLinear):
    """A product that takes the norm in front of it, as `interfaces.FusesNorm` says, and counts how often it does."""

    fused = 0

    def after_norm(self, x, residual, weight, eps):
        FusingLinear.fused += 1
        total = x if residual is None else x + residual
        return self(ops.rms_norm(total, weight, eps)), total

    def gated_after_norm(self, x, residual, weight, eps):
        product, total = self.after_norm(x, residual, weight, eps)
        return ops.silu_and_mul(product), total


class PlainPlan:
    """Attends to nothing: what comes out tells what came in."""

    def forward(self, layer, q, k, v):
        return q + k.repeat_interleave(2, 1) * 0.5 - v.repeat_interleave(2, 1)


class FusingPlan(PlainPlan):
    """A plan that takes projections, as `interfaces.TakesProjections` says, and counts how often it does."""

    fused = 0

    def forward_projections(self, layer, heads, rotation, norms):
        FusingPlan.fused += 1
        q, k, v = heads.split([4, 2, 2], dim=1)
        if norms is not None:
            q, k = ops.rms_norm(q, norms.q_weight, norms.eps), ops.rms_norm(k, norms.k_weight, norms.eps)
        cos, sin = rotation.table[rotation.positions].split(1, dim=1)
        return self.forward(layer, ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v)


def hidden(target, linear, plan):
    backend = SimpleNamespace(pack_linear=lambda weight, bias=None: linear(weight, bias), layer_ops=ops)
    device = torch.device("cpu")
    ctx = ModelContext(backend, DummySource(torch.float32, device, 3), torch.float32, device, 64)
    model = target(CONFIG, ctx)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    output = model.forward(x, torch.tensor([0, 7, 3, 3, 9]), ForwardContext([plan, plan], (0, 1, 2)))
    return torch.stack((output.hidden, *output.features))


@pytest.mark.parametrize("target", [Llama, Qwen3])  # without norms of heads, and with them
def test_layers_give_the_same_whether_their_neighbours_are_fused_or_not(target):
    plain = hidden(target, PlainLinear, PlainPlan())
    before = FusingLinear.fused
    torch.testing.assert_close(hidden(target, FusingLinear, PlainPlan()), plain)
    assert FusingLinear.fused - before == 4  # two norms a layer
    torch.testing.assert_close(hidden(target, PlainLinear, FusingPlan()), plain)


@pytest.mark.parametrize(("target", "takes_heads"), [(Gemma2, True), (Gemma3, False), (Olmo2, False)])
def test_norms_that_neighbours_do_not_take_are_composed(target, takes_heads):
    """Those whose weight is float32, those over whole projections, and none at all."""
    plain, before = hidden(target, PlainLinear, PlainPlan()), (FusingLinear.fused, FusingPlan.fused)
    torch.testing.assert_close(hidden(target, FusingLinear, FusingPlan()), plain)
    assert (FusingLinear.fused - before[0], FusingPlan.fused - before[1]) == (0, 2 if takes_heads else 0)


def test_cosines_are_not_gathered_for_a_plan_that_takes_projections(monkeypatch):
    def refuse(self, positions):
        raise AssertionError("gathered")

    monkeypatch.setattr("framework.layers.rope.Rotary.__call__", refuse)
    hidden(Qwen3, FusingLinear, FusingPlan())
    with pytest.raises(AssertionError, match="gathered"):
        hidden(Qwen3, FusingLinear, PlainPlan())
