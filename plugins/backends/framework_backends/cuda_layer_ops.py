"""Elementwise operations of a layer on a CUDA device: `interfaces.LayerOps` over the kernels in `triton`.

The meaning is that of `framework.layers.ops`. What a program works on follows from the width of a row alone, so that
a row has the same bits in any batch: one class serves with and without batch invariance.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from framework_backends.triton import activations, norms
from framework_backends.triton.launches import launches_dependent, pays


class CudaLayerOps:
    """`interfaces.LayerOps`; tensors may have any strides but along the last dimension, where they are contiguous."""

    def __init__(self) -> None:
        self._dependent = launches_dependent()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps, dependent=pays(self._dependent, len(x)))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum is made in the memory of `residual`."""
        dependent = pays(self._dependent, len(x))
        return norms.add_rms_norm(x, residual, weight, eps, in_place=True, dependent=dependent)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return activations.silu_and_mul(gate_up, dependent=pays(self._dependent, len(gate_up)))

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        return activations.gelu_tanh_and_mul(gate_up, dependent=pays(self._dependent, len(gate_up)))

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """torch's kernel takes a row a block, so that its bits follow from the width alone as well."""
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """In the memory of x."""
        return activations.soft_cap(x, cap, dependent=pays(self._dependent, len(x)))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return activations.rotate(x, cos, sin, dependent=pays(self._dependent, len(x)))
