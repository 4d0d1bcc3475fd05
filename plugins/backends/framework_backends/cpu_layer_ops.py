"""Elementwise operations of a layer on the CPU: the meaning of `framework.layers.ops` in fewer passes over memory.

Each call of torch costs some microseconds and a step makes hundreds, so what counts is the number of calls. Results
differ from the reference by rounding only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715 * _GELU_SCALE


class CpuLayerOps:
    """`interfaces.LayerOps` in plain torch."""

    def __init__(self) -> None:
        self._doubled: dict[int, tuple[Tensor, Tensor]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Counts in float32 to the end, the product with the weight included.

        torch has no kernel of its own for it on the CPU, eight small operations instead, but has one for layer norm:
        the mean of (x, -x) is 0 and its variance is the mean square of x. That pays for a single row.
        """
        size = weight.shape[0]
        if x.numel() != size:
            return _rms_norm(x, weight, eps)
        return torch.layer_norm(torch.cat((x, -x), -1), (2 * size,), self._twice(weight), None, eps)[..., :size]

    def _twice(self, weight: Tensor) -> Tensor:
        """(weight, weight), made once; the original is kept beside it, so that its id stays its own."""
        known = self._doubled.get(id(weight))
        if known is None:
            known = self._doubled[id(weight)] = (weight, torch.cat((weight, weight)))
        return known[1]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum is made in the memory of `residual`."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return torch.layer_norm(x, weight.shape, weight, bias, eps)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        wide = x.float() if x.dtype != torch.float32 else x.clone()
        return wide.div_(cap).tanh_().mul_(cap).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class InvariantLayerOps(CpuLayerOps):
    """The same, bit-equal for a row wherever it stands in the batch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One form, whatever the number of rows."""
        return _rms_norm(x, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """torch's own silu and sigmoid count the last few elements of a thread's share otherwise than the rest."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / torch.exp(-gate).add_(1)).mul_(up).to(gate_up.dtype)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """As for silu: (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y))."""
        return _gelu_tanh(x.float()).to(x.dtype)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return _gelu_tanh(gate).mul_(up).to(gate_up.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Counts in float32 to the end; torch does so by itself where both dtypes are one."""
    if weight.dtype == x.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    """Of float32, in memory of its own."""
    y = x * x * _GELU_CUBE + _GELU_SCALE
    return x / torch.exp(y.mul_(x).mul_(-2.0)).add_(1)
