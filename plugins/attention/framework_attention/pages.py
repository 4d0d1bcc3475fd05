"""KV memory of a layer as pages of keys and pages of values, the layout that libraries of attention kernels read; and
that of latents, one a token.

Knows no library. `flash_attn` and `flashinfer` write a step's keys and values with it and hand its pages to theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from framework.interfaces import AttentionContext, KVSpec, LayerSpec


def paged_spec(layer: LayerSpec, ctx: AttentionContext) -> KVSpec:
    """Memory of `Pages`."""
    values = 2 * ctx.block_size * layer.num_kv_heads * layer.head_dim
    shape = (2, -1, ctx.block_size, layer.num_kv_heads, layer.head_dim)
    return KVSpec(shape, ctx.dtype, values * ctx.dtype.itemsize)


def latent_spec(layer: LayerSpec, ctx: AttentionContext) -> KVSpec:
    """[num_blocks, block_size, head_dim]: one latent a token and nothing else."""
    assert layer.kind == "latent", layer
    shape = (-1, ctx.block_size, layer.head_dim)
    return KVSpec(shape, ctx.dtype, ctx.block_size * layer.head_dim * ctx.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Pages:
    """A layer with its KV memory [2, num_blocks, block_size, Hk, D]."""

    spec: LayerSpec
    kv: Tensor

    @property
    def keys(self) -> Tensor:
        """[num_blocks, block_size, Hk, D]"""
        return self.kv[0]

    @property
    def values(self) -> Tensor:
        """[num_blocks, block_size, Hk, D]"""
        return self.kv[1]

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [T, Hk, D] to their slots [T] int64, in a launch each."""
        by_slot = self.kv.flatten(1, 2)
        by_slot[0].index_copy_(0, slots, k)
        by_slot[1].index_copy_(0, slots, v)


def with_padding(out: Tensor, num_tokens: int) -> Tensor:
    """out [n, Hq, D] of the tokens that count, with 0 for the padding tokens behind them: [num_tokens, Hq, D]."""
    if len(out) == num_tokens:
        return out
    padded = torch.zeros(num_tokens, *out.shape[1:], dtype=out.dtype, device=out.device)
    padded[: len(out)] = out
    return padded
