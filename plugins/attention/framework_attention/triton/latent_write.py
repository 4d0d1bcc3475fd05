"""Latents into their slots, normalised, with their keys rotated: inside `absorb_kernel`, or in a launch of its own.

The rounding order is that of `framework.layers.ops`. Called by `latent_products` and, for steps with expanded prompts,
by `latent`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from framework_attention.triton.heads import angles, loaded, turned


class New(NamedTuple):
    """The step's queries q [T, H, d_nope + d_rope] and latents [T, R + d_rope], with their strides from token to token,
    and the slots [T] int64."""

    q: Tensor
    latent: Tensor
    q_stride: int
    latent_stride: int
    slots: Tensor


@triton.jit
def rotated(heads, turning, position, is_head, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """[n, DIM_PAD] float32: heads at pointers [n, 1], rotated by positions [n, 1] if `turning` has a table."""
    cos, sin = angles(turning, position, DIM, DIM_PAD)
    return turned(loaded(heads, None, turning, is_head, DIM, DIM_PAD), None, turning, cos, sin, DIM)


@triton.jit
def put_latents(
    new, turning, norming, token, position, is_token, kv,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """Latents of tokens [n] with their positions [n] into their slots. norming has a norm's weight [R], or None."""
    stored: tl.constexpr = kv.dtype.element_ty
    c, e, is_in = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, ROPE_PAD)[None, :], is_token[:, None]
    slot = tl.load(new.slots + token, mask=is_token, other=0)
    at, to = new.latent + token[:, None] * new.latent_stride, kv + slot[:, None] * (RANK + ROPE)
    raw = loaded(at, norming.k_weight, norming, is_in, RANK, RANK_PAD)
    latent = turned(raw, norming.k_weight, norming, 0.0, 0.0, RANK)
    tl.store(to + c, latent.to(stored), mask=is_in & (c < RANK))
    key = rotated(at + RANK, turning, position[:, None], is_in, ROPE, ROPE_PAD)
    tl.store(to + RANK + e, key.to(stored), mask=is_in & (e < ROPE))


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    new, turning, norming, positions, num_tokens, kv,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, TOKENS),). Every token's latent. positions [T] int64, None without a rotation."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_token = token < num_tokens
    position = token * 0
    if positions is not None:
        position = tl.load(positions + token, mask=is_token, other=0)
    put_latents(new, turning, norming, token, position, is_token, kv, RANK, RANK_PAD, ROPE, ROPE_PAD)
