"""Elementwise operations of a layer on the CPU: the meaning of `framework.layers.ops` in fewer passes over memory.

Each call of torch costs some microseconds and a step makes hundreds, so what counts is the number of calls. Results
differ from the reference by rounding only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
            return torch.rms_norm(x, weight.shape, weight, eps)
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

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q and k that lie side by side, as views of one fused product do, are rotated together."""
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if not _side_by_side(q, k):
            return _rotate(q, cos, sin), _rotate(k, cos, sin)
        heads = q.shape[1] + k.shape[1]
        rotated = _rotate(q.as_strided((q.shape[0], heads, q.shape[2]), q.stride()), cos, sin)
        return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]


class InvariantLayerOps(CpuLayerOps):
    """The same, bit-equal for a row wherever it stands in the batch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One form, whatever the number of rows."""
        return torch.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """torch's own silu and sigmoid count the last few elements of a thread's share otherwise than the rest."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / torch.exp(-gate).add_(1)).mul_(up).to(gate_up.dtype)


def _side_by_side(q: Tensor, k: Tensor) -> bool:
    dim, begin = q.shape[2], q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    return q.dtype == k.dtype and q.stride() == k.stride() and q.stride()[1:] == (dim, 1) and k.data_ptr() == begin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]; cos, sin [T, 1, D / 2] float32. Rotates in float32."""
    wide = x.float().view(x.shape[0], x.shape[1], 2, x.shape[2] // 2)
    first, second = wide.unbind(2)
    out = torch.mul(wide, cos.unsqueeze(1))
    out_first, out_second = out.unbind(2)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out.view(x.shape).to(x.dtype)
