"""Softmax attention over gathered keys and values as batched products: a fast form, and one of fixed reduction order.

Nothing here knows blocks: `cpu` gathers keys and values into the memory that a form was built on, then calls it once a
layer. Views of scratch memory are made once a step, since at one row a view costs as much as arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from framework.errors import ConfigError
from framework.interfaces import LayerSpec

TILE = 64
"""Keys a product of the fixed form covers, at least; tiles start at multiples of it in the request's own positions."""
_PADS = (1, 4, 8, 16, 64, 128)
"""The last ones are for processors with tiles (AMX)."""
_TILED_ROWS = 16
_COUNTS = (1, 2, 3, 4, 6, 9, 16, 17, 33, 48, 64, 100, 129)


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


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one product: `queries` tokens of each of `requests`, `heads` KV heads with `group` query heads each."""

    heads: int
    requests: int
    queries: int
    group: int
    dim: int

    def split(self, q: Tensor) -> Tensor:
        """[n * t, Hq, D] -> [Hk * n, t * G, D]: rows that share keys stand together."""
        if self.requests * self.queries == 1:
            return q.view(self.heads, self.group, self.dim)
        tokens = q.view(self.requests, self.queries, self.heads, self.group, self.dim)
        return tokens.permute(2, 0, 1, 3, 4).reshape(self.heads * self.requests, -1, self.dim)

    def join(self, out: Tensor) -> Tensor:
        """The inverse of `split`, contiguous."""
        if self.requests * self.queries == 1:
            return out.view(1, -1, self.dim)
        rows = out.view(self.heads, self.requests, self.queries, self.group, self.dim)
        return rows.permute(1, 2, 0, 3, 4).reshape(self.requests * self.queries, -1, self.dim)


@dataclass(frozen=True, slots=True)
class Scoring:
    """What makes scores of products, and what joins their softmax. sinks [Hk, 1, 1, G, 1] float32, None without."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, spec: LayerSpec) -> Scoring:
        sinks = None if spec.sinks is None else spec.sinks.float().view(spec.num_kv_heads, 1, 1, -1, 1)
        return cls(spec.scale, spec.softcap, sinks)

    def cap(self, products: Tensor) -> float:
        """Turns float32 products into capped scores but for the factor that it returns; in place."""
        if self.softcap is None:
            return self.scale
        products.mul_(self.scale / self.softcap).tanh_()
        return self.softcap


class Dense:
    """The fast form: two products over the whole context. Rounding depends on shapes, hence on the neighbours.

    keys, values  [Hk * n, L, D] memory that is filled before each call; positions without a key hold finite values
    mask          [n, t, 1, L] float32, 0 where a query may read a key and -inf elsewhere; no row is -inf throughout
    """

    def __init__(self, shape: Shape, keys: Tensor, values: Tensor, mask: Tensor, scratch: Scratch) -> None:
        sizes = (len(keys), shape.queries * shape.group, keys.shape[1])
        self._shape, self._keys, self._values, self._mask = shape, keys.transpose(1, 2), values, mask
        # Products round to their own dtype; the softmax counts in float32, in the same memory when that is the dtype.
        self._is_wide = keys.dtype == torch.float32
        self._scores = scratch.take("scores", keys.dtype, *sizes)
        self._weights = scratch.take("scores", torch.float32, *sizes)
        by_query = (shape.heads, shape.requests, shape.queries, shape.group, -1)
        self._scores_by_query, self._weights_by_query = self._scores.view(by_query), self._weights.view(by_query)

    def __call__(self, q: Tensor, scoring: Scoring) -> Tensor:
        """[n * t, Hq, D] -> the same shape."""
        torch.bmm(self._shape.split(q), self._keys, out=self._scores)
        if scoring.softcap is None:
            torch.add(self._mask, self._scores_by_query, alpha=scoring.scale, out=self._weights_by_query)
        else:
            factor = scoring.cap(self._weights if self._is_wide else self._weights.copy_(self._scores))
            torch.add(self._mask, self._weights_by_query, alpha=factor, out=self._weights_by_query)
        if scoring.sinks is None:
            torch.softmax(self._weights, dim=-1, out=self._weights)
        else:
            _softmax_with_sinks(self._weights_by_query, scoring.sinks)
        if not self._is_wide:
            self._scores.copy_(self._weights)
        return self._shape.join(torch.bmm(self._scores, self._values))


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> None:
    """Softmax over the last dimension of scores [Hk, n, t, G, L] with a further score a head that has no value; in
    place. Source: Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453), section 3.2."""
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    scores.sub_(top).exp_()
    scores.div_(scores.sum(-1, keepdim=True).add_((sinks - top).exp_()))


class Tiled:
    """The fixed form: the bits of a query's result depend on its own query, keys and values only.

    Arguments as for `Dense`, and
    tile  keys a product; divides L
    pad   rows of every product are padded to a multiple of it: the least for which products agree row by row
    Every tile gives a partial sum of one shape, and partial sums are added in the order of positions. A tile that a row
    may not read adds exact zeros, so it does not matter how far the longest neighbour reaches.
    """

    def __init__(
        self, shape: Shape, keys: Tensor, values: Tensor, mask: Tensor, scratch: Scratch, *, tile: int, pad: int
    ) -> None:
        tiles = keys.shape[1] // tile
        assert tiles * tile == keys.shape[1], (keys.shape, tile)
        self._shape, self._tiles, self._missing = shape, tiles, -(shape.queries * shape.group) % pad
        self._keys, self._values = keys.view(-1, tile, shape.dim).transpose(1, 2), values.view(-1, tile, shape.dim)
        self._mask = mask.view(shape.requests, shape.queries, 1, tiles, tile).permute(0, 3, 1, 2, 4)

    def __call__(self, q: Tensor, scoring: Scoring) -> Tensor:
        """[n * t, Hq, D] -> the same shape."""
        shape, tiles = self._shape, self._tiles
        rows = shape.queries * shape.group
        queries = functional.pad(shape.split(q), (0, 0, 0, self._missing)).unsqueeze(1).expand(-1, tiles, -1, -1)
        scores = torch.bmm(queries.flatten(0, 1), self._keys).float()
        scores.mul_(scoring.cap(scores))
        by_tile = scores.view(shape.heads, shape.requests, tiles, rows + self._missing, -1)
        by_tile[:, :, :, :rows].unflatten(3, (shape.queries, shape.group)).add_(self._mask)
        top = by_tile.amax((2, 4), keepdim=True)
        sinks = None if scoring.sinks is None else self._sinks_of_rows(scoring.sinks)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        by_tile.sub_(top).exp_()
        total = _sum_in_order(by_tile.sum(-1))
        if sinks is not None:
            total += (sinks - top).exp_().view(total.shape)
        parts = torch.bmm(scores.to(q.dtype), self._values).float()
        out = _sum_in_order(parts.view(*by_tile.shape[:4], shape.dim)) / total.unsqueeze(-1)
        return shape.join(out[:, :, :rows].to(q.dtype).contiguous())

    def _sinks_of_rows(self, sinks: Tensor) -> Tensor:
        """[Hk, 1, 1, rows, 1]: each row's, padded ones included."""
        by_row = sinks.expand(-1, -1, self._shape.queries, -1, -1).reshape(self._shape.heads, -1)
        return functional.pad(by_row, (0, self._missing)).view(self._shape.heads, 1, 1, -1, 1)


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum over dimension 2, first to last: a running sum, because `sum` groups its terms by their number."""
    return parts.cumsum(2).select(2, -1)


@cache
def row_padding(dtype: torch.dtype, head_dim: int, tile: int) -> int:
    """The least row multiple for which this machine's batched products agree bit by bit, whatever the number of rows.

    Measured once a process, for both products of a tile. Raises ConfigError when no multiple is good enough.
    """
    least = _least_padding(dtype, min(head_dim, tile))
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(6, 256, max(head_dim, tile), generator=generator).to(dtype)
    keys = torch.randn(6, tile, head_dim, generator=generator).to(dtype)
    for pad in (pad for pad in _PADS if pad >= least):
        if _agree(left[..., :head_dim], keys.transpose(1, 2), pad) and _agree(left[..., :tile], keys, pad):
            return pad
    raise ConfigError(
        f"engine.batch_invariant=true: batched products of {dtype} with head_dim {head_dim} differ with the number of "
        f"rows on this CPU, also when padded to {_PADS[-1]}. Change engine.dtype or set engine.batch_invariant=false."
    )


def _least_padding(dtype: torch.dtype, width: int) -> int:
    """On processors with tiles a few sums of 16 bits depend on the number of rows below that of a tile, and of products
    that do not fill its width also above: too rarely for a probe. width: the lesser one of a product."""
    if dtype.itemsize != 2 or not torch.cpu._is_amx_tile_supported():
        return 1
    return _TILED_ROWS if width >= _TILED_ROWS else 64


def _agree(left: Tensor, right: Tensor, pad: int) -> bool:
    """Whether each row of left has the bits that it has in the whole, in any company and at other places."""
    whole = _padded(left, right, pad)
    for count in _COUNTS:
        order = torch.randperm(left.shape[1], generator=torch.Generator().manual_seed(count))
        for number, rows in enumerate(order.split(count)):
            batch = (1, 5, 6)[number % 3]
            if not torch.equal(_padded(left[:batch, rows], right[:batch], pad), whole[:batch, rows]):
                return False
    return True


def _padded(left: Tensor, right: Tensor, pad: int) -> Tensor:
    rows = left.shape[1]
    return torch.bmm(functional.pad(left, (0, 0, 0, -rows % pad)), right)[:, :rows]
