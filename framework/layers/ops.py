"""Torch reference of `interfaces.LayerOps`: what each elementwise operation of a layer means, exactly.

A backend may bring faster versions and is tested against these. Nothing here writes into its arguments, and every
function accepts tensors with any strides: models pass views of fused products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [..., D] -> [..., D] in x's dtype.

    weight [D]. The mean and the division count in float32; the quotient is rounded to x's dtype before the product
    with the weight, which is the order that checkpoints were trained with.
    Source: Root Mean Square Layer Normalization (arXiv 1910.07467), equation 4.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, D] in x's dtype; the sum is rounded before it is normalised."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half, [T, 2 I] -> [T, I]. Source: GLU variants (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q [T, Hq, D] and k [T, Hk, D] by cos, sin [T, D / 2] float32, in the dtypes of q and k.

    Element i is paired with element i + D / 2 (half-split pairs); the rotation counts in float32.
    Source: RoFormer (arXiv 2104.09864), section 3.2.2, with the pairing of the Hugging Face layout.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate_one(q, cos, sin), _rotate_one(k, cos, sin)


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
