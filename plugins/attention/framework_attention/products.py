"""Softmax attention over contiguous keys and values as batched products: a fast form, and one of fixed reduction order.

Nothing here knows blocks, requests or plans; `cpu` gathers the keys and calls one of the two forms. Both take

    q     [Hk, n, t, G, D]  t query tokens of n requests, the G query heads that share a KV head side by side
    k, v  [Hk * n, L, D]    in q's dtype; positions without a key must hold finite values
    mask  [n, t, 1, L]      float32, 0 where a query may read a key and -inf elsewhere; no row is -inf throughout

and return [Hk, n, t, G, D] in q's dtype. Softmax counts in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from framework.errors import ConfigError

TILE = 64
"""Keys a product of the fixed form covers, at least; tiles start at multiples of it in the request's own positions."""
_PADS = (1, 4, 8, 16)


class Scratch:
    """Memory kept over layers and steps: fresh megabytes would cost a page fault for every page, each time."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A contiguous tensor with undefined contents, valid until the next call for the same use and dtype."""
        size = math.prod(shape)
        memory = self._memory.get((use, dtype))
        if memory is None or memory.numel() < size:
            memory = self._memory[use, dtype] = torch.empty(size + size // 4, dtype=dtype)
        return memory[:size].view(shape)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, scratch: Scratch) -> Tensor:
    """The fast form: two products over the whole context. Rounding depends on shapes, hence on the neighbours."""
    heads, n, t, group, dim = q.shape
    shape = (heads * n, t * group, k.shape[1])
    scores = scratch.take("scores", q.dtype, *shape)
    torch.bmm(q.reshape(heads * n, t * group, dim), k.transpose(1, 2), out=scores)
    weights = scratch.take("scores", torch.float32, *shape)  # the same memory when q is float32
    wide = weights.view(heads, n, t, group, -1)
    torch.add(mask, scores.view(wide.shape), alpha=scale, out=wide)
    torch.softmax(weights, dim=-1, out=weights)
    return torch.bmm(weights if weights.dtype == q.dtype else scores.copy_(weights), v).view(q.shape)


def attend_tiled(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, scratch: Scratch, *, tile: int, pad: int
) -> Tensor:
    """The fixed form: a query row's bits depend on its own query, keys and values only.

    tile  keys a product; divides L
    pad   rows of every product are padded to a multiple of it: the least for which products agree row by row
    Every tile gives a partial sum of one shape, and partial sums are added in the order of positions. A tile that a row
    may not read adds exact zeros, so it does not matter how far the longest neighbour reaches.
    """
    heads, n, t, group, dim = q.shape
    tiles, rows = k.shape[1] // tile, t * group
    assert tiles * tile == k.shape[1], (k.shape, tile)
    queries = functional.pad(q.reshape(heads * n, 1, rows, dim), (0, 0, 0, -rows % pad))
    queries = queries.expand(-1, tiles, -1, -1).reshape(heads * n * tiles, -1, dim)
    scores = torch.bmm(queries, k.reshape(-1, tile, dim).transpose(1, 2)).float().mul_(scale)
    scores = scores.view(heads, n, tiles, -1, tile)
    readable = mask.view(n, t, 1, tiles, tile).permute(0, 3, 1, 2, 4)
    scores[:, :, :, :rows].unflatten(3, (t, group)).add_(readable)
    weights = scores.sub_(scores.amax((2, 4), keepdim=True)).exp_()
    total = _sum_in_order(weights.sum(-1))
    parts = torch.bmm(weights.to(q.dtype).view(heads * n * tiles, -1, tile), v.reshape(-1, tile, dim)).float()
    out = _sum_in_order(parts.view(heads, n, tiles, -1, dim)) / total.unsqueeze(-1)
    return out[:, :, :rows].to(q.dtype).view(q.shape)


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum over dimension 2, first to last: a running sum, because `sum` groups its terms by their number."""
    return parts.cumsum(2).select(2, -1)


def row_padding(dtype: torch.dtype, head_dim: int, tile: int) -> int:
    """The least row multiple for which this machine's batched products agree bit by bit, whatever the number of rows.

    Measured once at start-up, for both products of a tile. Raises ConfigError when no multiple is good enough.
    """
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(6, 256, max(head_dim, tile), generator=generator).to(dtype)
    keys = torch.randn(6, tile, head_dim, generator=generator).to(dtype)
    for pad in _PADS:
        if _agree(left[..., :head_dim], keys.transpose(1, 2), pad) and _agree(left[..., :tile], keys, pad):
            return pad
    raise ConfigError(
        f"engine.batch_invariant=true: batched products of {dtype} with head_dim {head_dim} differ with the number of "
        f"rows on this CPU, also when padded to {_PADS[-1]}. Change engine.dtype or set engine.batch_invariant=false."
    )


def _agree(left: Tensor, right: Tensor, pad: int) -> bool:
    whole = torch.bmm(left, right)
    for rows in (1, 2, 3, 4, 6, 9, 16, 33, 100):
        part = functional.pad(left[:, 7 : 7 + rows], (0, 0, 0, -rows % pad))
        for batch in (1, 5, 6):
            if not torch.equal(torch.bmm(part[:batch], right[:batch])[:, :rows], whole[:batch, 7 : 7 + rows]):
                return False
    return True
