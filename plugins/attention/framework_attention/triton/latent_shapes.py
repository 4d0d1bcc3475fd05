"""Tile shapes of latent attention: how much of which kernel a program computes.

Chosen from dtype, heads and the memory that a program may have, and with `batch_invariant` from nothing that a step
changes. Sizes are those of tiles, powers of 2. `latent` asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from framework_attention.triton.shapes import first_with_room

_LARGE = 173_000
"""Bytes that the larger tiles of prompts take in a short dtype, about."""
_BETWEEN = 8192
"""Bytes at most, for ranks up to 512, of what a tile of latents passes through between its two products."""


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


def latent_shape(dtype: torch.dtype, num_heads: int, rank: int, rope: int, shared_bytes: int) -> LatentShape:
    """rank, rope: values of a key. With 512 + 64 in a short dtype and 16 heads two programs fit a multiprocessor of an
    H200, each with two tiles on the way. Tiles of 64 keys leave room for one, which Triton makes wait for every tile.
    Of many heads 64 in a program are faster than 32, as each tile is read half as often
    (benchmarks/results/models-h200-2026-11-30.md). Raises ConfigError where no tile has room."""

    def num_bytes(shape: LatentShape) -> int:
        tiles = max(shape.num_stages - 1, 1)
        return dtype.itemsize * (shape.members + tiles * shape.tile) * (rank + rope) + max(_BETWEEN, 16 * rank)

    shapes = _measured_latent_shapes(dtype, num_heads, rank + rope)
    return first_with_room(f"attention=mla_triton: a key of {rank} + {rope} values", shapes, num_bytes, shared_bytes)


def _measured_latent_shapes(dtype: torch.dtype, num_heads: int, width: int) -> Iterator[LatentShape]:
    """From the fastest on an H200 to what takes the least memory."""
    if dtype is torch.float32:
        yield LatentShape(16, 16, 8, 1)
        return
    if width <= 576:
        if num_heads >= 64:
            yield LatentShape(64, 32, 8, 2)
        if num_heads > 16:
            yield LatentShape(32, 32, 8, 3)
            yield LatentShape(32, 32, 8, 2)
        yield LatentShape(16, 32, 4, 3)
    yield LatentShape(16, 32, 4, 2)


@dataclass(frozen=True)
class ExpandedShape:
    """Of `latent_prompt_kernel`: queries and keys of a tile."""

    queries: int
    tile: int
    num_warps: int
    num_stages: int


def prompt_shape(dtype: torch.dtype, shared_bytes: int) -> ExpandedShape:
    """With heads of 192 and values of 128 three tiles of 64 keys and the queries take 170 KiB."""
    if dtype is torch.float32:
        return ExpandedShape(32, 16, 4, 1)
    return ExpandedShape(128, 64, 8, 3) if shared_bytes >= _LARGE else ExpandedShape(64, 32, 4, 2)


def absorb_shape(
    dtype: torch.dtype, nope: int, num_queries: int, shared_bytes: int, *, is_invariant: bool
) -> ProductShape:
    """nope: of a head's query, what is not rotated.

    Many columns a program for many queries: weights are read once a program. On an H200 all shapes that were tried are
    within 4 percent of the layer's time here, at 1 to 256 queries of DeepSeek-V2-Lite. Raises ConfigError where no
    columns have room.
    """

    def num_bytes(shape: ProductShape) -> int:
        return dtype.itemsize * nope * (shape.queries + shape.columns)

    shape = ProductShape(64, 128) if is_invariant or num_queries > 64 else ProductShape(16, 64)
    what = f"attention=mla_triton: a query of {nope} values before its rotated ones"
    return first_with_room(what, _narrower(shape), num_bytes, shared_bytes)


def expand_shape(
    dtype: torch.dtype, rank: int, num_queries: int, shared_bytes: int, *, is_invariant: bool
) -> ProductShape:
    """Few queries have many parts, and many have few. Raises ConfigError where no columns have room.

    Of DeepSeek-V2-Lite on an H200, microseconds of a layer's attention in a captured step with this shape, and with 16
    queries of one part: 13 and 21 at 1 query, 23 and 25 at 16, 47 at 64 (50 with four queries, 59 with two), 126 and
    129 at 256.
    """

    def num_bytes(shape: ProductShape) -> int:  # the weight's columns, and two tiles of parts
        return dtype.itemsize * rank * (shape.columns + 2 * shape.queries * shape.merge)

    shapes = _measured_expand_shapes(dtype, num_queries, is_invariant)
    return first_with_room(f"attention=mla_triton: a latent of {rank} values", shapes, num_bytes, shared_bytes)


def _measured_expand_shapes(dtype: torch.dtype, num_queries: int, is_invariant: bool) -> Iterator[ProductShape]:
    if not is_invariant and num_queries > 128 and dtype is not torch.float32:
        yield ProductShape(32, 128, num_warps=8)
    if is_invariant or num_queries > 32:
        yield from _narrower(ProductShape(16, 64))
    elif num_queries > 16:
        yield from _narrower(ProductShape(4, 64, 4))
    else:
        yield from _narrower(ProductShape(1, 32, 16) if num_queries <= 4 else ProductShape(2, 64, 8))


def _narrower(shape: ProductShape) -> Iterator[ProductShape]:
    """The shape, and those of fewer columns down to the 16 of a matrix instruction."""
    while shape.columns >= 16:
        yield shape
        shape = replace(shape, columns=shape.columns // 2)
