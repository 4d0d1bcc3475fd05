"""The gate of a feed-forward block, the rotation of heads and the cap of logits, one launch each.

The references are `silu_and_mul`, `gelu_tanh_and_mul`, `rotate` and `soft_cap` of `framework.layers.ops`. Every value
is computed by itself, so that rows do not depend on one another. Called by `cuda_layer_ops` and `cuda_linear`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from framework_backends.triton.launches import launch_words, let_next_begin, wait_for_previous

GATE_BLOCK = 1024
HEADS = 16


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """float32, within 2e-7: 1 - 2 / (1 + exp(2 x)), without overflow."""
    below = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - below) / (1.0 + below)
    return tl.where(x < 0, -size, size)


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), float32; (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y))."""
    y = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
    return x / (1.0 + tl.exp(-2.0 * y))


@triton.jit
def gate_kernel(gate_up, stride, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (T, blocks of BLOCK values): out [T, size] = act(gate_up[:, :size]) * gate_up[:, size:], silu or gelu."""
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    wait_for_previous(DEPENDENT)
    gate = tl.load(gate_up + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + i, mask=mask, other=0.0).to(tl.float32)
    opened = gelu_tanh(gate) if GELU else silu(gate)
    opened = opened.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + i, opened * up, mask=mask)


@triton.jit
def rotate_kernel(
    x, x_token, x_head, cos, cos_token, sin, sin_token, out, num_heads,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of HEADS heads): out [T, H, D] contiguous. HALF is D / 2 or the power of 2 above."""
    let_next_begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    low = tl.arange(0, HALF)[None, :]
    high = low + D // 2
    is_in = low < D // 2
    mask = (head < num_heads) & is_in
    wait_for_previous(DEPENDENT)
    at = x + token * x_token + head * x_head
    first = tl.load(at + low, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + high, mask=mask, other=0.0).to(tl.float32)
    cos += token * cos_token
    sin += token * sin_token
    into = out + (token * num_heads + head) * D
    turned = first * tl.load(cos + low, mask=is_in) + second * tl.load(sin + low, mask=is_in)
    tl.store(into + low, turned, mask=mask)
    turned = second * tl.load(cos + high, mask=is_in) + first * tl.load(sin + high, mask=is_in)
    tl.store(into + high, turned, mask=mask)


@triton.jit
def cap_kernel(x, stride, size, cap, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (T, blocks of BLOCK values): x [T, size] becomes cap * tanh(x / cap)."""
    let_next_begin(DEPENDENT)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    wait_for_previous(DEPENDENT)
    at = x + tl.program_id(0).to(tl.int64) * stride + i
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, tanh(value / cap) * cap, mask=mask)


def silu_and_mul(gate_up: Tensor, *, dependent: bool = False) -> Tensor:
    """As `layers.ops.silu_and_mul`, for gate_up [T, 2 I] with contiguous rows."""
    return _gate(gate_up, is_gelu=False, dependent=dependent)


def gelu_tanh_and_mul(gate_up: Tensor, *, dependent: bool = False) -> Tensor:
    """As `layers.ops.gelu_tanh_and_mul`, for gate_up [T, 2 I] with contiguous rows."""
    return _gate(gate_up, is_gelu=True, dependent=dependent)


def _gate(gate_up: Tensor, *, is_gelu: bool, dependent: bool) -> Tensor:
    assert gate_up.stride(1) == 1, f"rows must be contiguous, strides are {gate_up.stride()}"
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gate_kernel[(rows, triton.cdiv(size, GATE_BLOCK))](
            gate_up, gate_up.stride(0), out, size, GELU=is_gelu, BLOCK=GATE_BLOCK, num_warps=4,
            **launch_words(dependent),
        )  # fmt: skip
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, dependent: bool = False) -> Tensor:
    """As `layers.ops.rotate`, for heads that are contiguous in x, cos and sin."""
    assert x.stride(2) == cos.stride(2) == sin.stride(2) == 1, (x.stride(), cos.stride(), sin.stride())
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        rotate_kernel[(tokens, triton.cdiv(heads, HEADS))](
            x, x.stride(0), x.stride(1), cos, cos.stride(0), sin, sin.stride(0), out, heads,
            D=size, HALF=triton.next_power_of_2(size // 2), HEADS=HEADS, num_warps=4, **launch_words(dependent),
        )  # fmt: skip
    return out


def soft_cap(x: Tensor, cap: float, *, dependent: bool = False) -> Tensor:
    """As `layers.ops.soft_cap`, in the memory of x [T, V] with contiguous rows."""
    assert x.stride(1) == 1, f"rows must be contiguous, strides are {x.stride()}"
    rows, size = x.shape
    if rows:
        cap_kernel[(rows, triton.cdiv(size, GATE_BLOCK))](
            x, x.stride(0), size, cap, BLOCK=GATE_BLOCK, num_warps=4, **launch_words(dependent)
        )
    return x
