"""Products that share an input are stacked in the order given, weights and biases alike."""

from types import SimpleNamespace

import pytest
import torch

from framework.layers.linear import load_linear


class Tensors:
    """A weight source over a dict, checking the shapes that are asked for."""

    def __init__(self, tensors):
        self.tensors = tensors

    def take(self, name, shape, dtype=None):
        assert tuple(self.tensors[name].shape) == tuple(shape)
        return self.tensors[name]


def packed(tensors, parts, in_features, bias):
    backend = SimpleNamespace(pack_linear=lambda weight, bias: (weight, bias))
    return load_linear(SimpleNamespace(weights=Tensors(tensors), backend=backend), parts, in_features, bias=bias)


@pytest.mark.parametrize("in_features", [3, 40_000])  # several rows a copy, and one
def test_weights_and_biases_stand_below_each_other(in_features):
    generator = torch.Generator().manual_seed(0)
    parts = [("q", 9), ("k", 4), ("v", 5)]
    tensors = {f"{name}.weight": torch.randn(rows, in_features, generator=generator) for name, rows in parts}
    tensors |= {f"{name}.bias": torch.randn(rows, generator=generator) for name, rows in parts}
    weight, bias = packed(tensors, parts, in_features, bias=True)
    assert torch.equal(weight, torch.cat([tensors[f"{name}.weight"] for name, _ in parts]))
    assert torch.equal(bias, torch.cat([tensors[f"{name}.bias"] for name, _ in parts]))


def test_without_bias_none_is_read():
    weight, bias = packed({"o.weight": torch.ones(2, 3)}, [("o", 2)], 3, bias=False)
    assert weight.shape == (2, 3) and bias is None
