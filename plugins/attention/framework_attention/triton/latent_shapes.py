"""Tile shapes of latent attention: how much of which kernel a program computes.

Chosen from dtype, heads and the memory of a multiprocessor, and with `batch_invariant` from nothing that a step
changes. `latent` asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LARGE, _SMALL = 173_000, 95_000
"""Bytes of a multiprocessor that the larger tiles take in a short dtype, and two tiles of 32 latents of 576
with the queries of 16 heads, about."""


@dataclass(frozen=True)
class LatentShape:
    """Of `latent_decode_kernel`: heads of a program and keys of a tile; and how `list_queries_kernel` cuts keys.

    programs_per_sm, good_keys, min_keys  as in `shapes.DecodeShape`
    """

    members: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    good_keys: int = 512
    min_keys: int = 64


@dataclass(frozen=True)
class ProductShape:
    """Of `absorb_kernel` and `expand_kernel`: queries, and columns of what a program computes. merge: parts of a query
    that `expand_kernel` takes at a time; queries times merge are rows of a product, at least 16."""

    queries: int
    columns: int
    merge: int = 1
    num_warps: int = 4


def latent_shape(dtype: torch.dtype, num_heads: int, width: int, shared_bytes: int) -> LatentShape:
    """width: values of a key. With 576 in a short dtype and 16 heads two programs fit a multiprocessor, each with two
    tiles on the way. Tiles of 64 keys leave room for one, which Triton makes wait for every tile. Of many heads 64 in a
    program are faster than 32, as each tile is read half as often (benchmarks/results/models-h200-2026-11-30.md)."""
    if dtype is torch.float32:
        return LatentShape(16, 16, 8, 1)
    if shared_bytes < _SMALL or width > 576:
        return LatentShape(16, 32, 4, 2)
    if num_heads <= 16:
        return LatentShape(16, 32, 4, 3)
    return LatentShape(64, 32, 8, 2) if num_heads >= 64 else LatentShape(32, 32, 8, 3)


@dataclass(frozen=True)
class ExpandedShape:
    """Of `latent_prompt_kernel`: queries and keys of a tile."""

    queries: int
    tile: int
    num_warps: int
    num_stages: int


def has_room(dtype: torch.dtype, shared_bytes: int) -> bool:
    """Whether a multiprocessor holds the largest tiles."""
    return dtype is not torch.float32 and shared_bytes >= _LARGE


def prompt_shape(dtype: torch.dtype, shared_bytes: int) -> ExpandedShape:
    """With heads of 192 and values of 128 three tiles of 64 keys and the queries take 170 KiB."""
    if dtype is torch.float32:
        return ExpandedShape(32, 16, 4, 1)
    return ExpandedShape(128, 64, 8, 3) if has_room(dtype, shared_bytes) else ExpandedShape(64, 32, 4, 2)


def absorb_shape(num_queries: int, is_invariant: bool) -> ProductShape:
    """Many columns a program for many queries: weights are read once a program. On an H200 all shapes that were tried
    are within 4 percent of the layer's time here, at 1 to 256 queries of DeepSeek-V2-Lite."""
    if is_invariant or num_queries > 64:
        return ProductShape(64, 128)
    return ProductShape(16, 64)


def expand_shape(num_queries: int, is_invariant: bool, has_room: bool) -> ProductShape:
    """Few queries have many parts, and many have few. has_room: for the largest tiles, which take 160 KiB.

    Of DeepSeek-V2-Lite on an H200, microseconds of a layer's attention in a captured step with this shape, and with 16
    queries of one part: 13 and 21 at 1 query, 23 and 25 at 16, 47 at 64 (50 with four queries, 59 with two), 126 and
    129 at 256.
    """
    if not is_invariant and num_queries > 128 and has_room:
        return ProductShape(32, 128, num_warps=8)
    if is_invariant or num_queries > 32:
        return ProductShape(16, 64)
    if num_queries > 16:
        return ProductShape(4, 64, 4)
    return ProductShape(1, 32, 16) if num_queries <= 4 else ProductShape(2, 64, 8)
