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
    with a weight of that dtype, and not before the product with a float32 weight: the orders that checkpoints were
    trained with. Source: Root Mean Square Layer Normalization (arXiv 1910.07467), equation 4.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, D] in x's dtype; the sum is rounded before it is normalised."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half, [T, 2 I] -> [T, I]. Source: GLU variants (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), in x's dtype, counted in float32.

    Source: Gaussian Error Linear Units (arXiv 1606.08415), section 2.
    """
    return functional.gelu(x, approximate="tanh")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(first half) * second half, [T, 2 I] -> [T, I]. Source: GLU variants (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, counted in float32, in x's dtype.

    weight, bias [D]. Source: Layer Normalization (arXiv 1607.06450), equation 4.
    """
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in x's dtype, counted in float32. Source: Gemma 2 (arXiv 2408.00118), section 2."""
    return ((x.float() / cap).tanh() * cap).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, H, D] by cos, sin [T, 1, D] float32, in the dtype of x.

    Element i is paired with element i + D / 2 (half-split pairs); the rotation counts in float32. cos stands twice and
    the first half of sin is negated, so that both elements of a pair take the same form.
    Source: RoFormer (arXiv 2104.09864), section 3.2.2, with the pairing of the Hugging Face layout.
    """
    wide = x.float()
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
