"""Latent attention in plain torch for the CPU: one latent a token in paged memory, absorbed or expanded.

Decodes and short spans meet latents as they lie; long spans expand them, new tokens first and their context in pieces
of bounded memory, merged by log-sum-exp. `latent_rows` chooses, `latent_products` computes; this module binds both to
the KV memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from framework.batch import InputBatch
from framework.interfaces import AttentionCaps, AttentionContext, KVSpec, LatentPlan, LatentUp, LayerSpec
from framework_attention.latent_products import (
    Absorbed,
    Partial,
    absorb,
    attend,
    causal_mask,
    cut,
    expand,
    merge_into,
    release,
)
from framework_attention.latent_rows import Ints, StepRows, Widths, is_cheaper_expanded
from framework_attention.pages import latent_spec
from framework_attention.products import TILE, Scoring, Scratch, Shape, Tiled, row_padding
from framework_attention.spans import Limits, Span

_MAX_GATHERED_BYTES = 1 << 22
"""Of one product over absorbed queries: what is gathered should still be in a cache when it is multiplied."""
_MAX_EXPANDED, _MIN_PIECE = 1 << 21, 256
"""Values of the keys and values that are expanded at a time, so that a long context needs no large memory, and tokens
that are expanded at a time even if that takes more."""
_MAX_SCORES = 1 << 19
_MAX_ROWS = 256
"""Rows of one product of fixed bits: no number of rows is used that `row_padding` has not looked at."""


@dataclass(frozen=True, slots=True)
class BoundLatents:
    """A latent layer with its KV memory [num_blocks, block_size, rank + rope], in the two shapes it is used in.

    blocks  [num_blocks, block_size * D]; slots [num_blocks * block_size, D], the same memory
    """

    spec: LayerSpec
    scoring: Scoring
    kv: Tensor
    blocks: Tensor
    slots: Tensor

    @classmethod
    def bind(cls, spec: LayerSpec, kv: Tensor) -> BoundLatents:
        return cls(spec, Scoring.of(spec), kv, kv.flatten(1), kv.flatten(0, 1))


class MlaTorch:
    """Paged latent attention on the CPU. Takes no options.

    With batch invariance every query is absorbed, in products of fixed shapes: which form is cheaper depends on how a
    prompt is cut. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        block_sizes=(16, 8, 32, 64, 128), any_block_size=True, latent=True, batch_invariant=True
    )

    def __init__(self, options: Mapping[str, Any], ctx: AttentionContext) -> None:
        self.ctx, self.scratch = ctx, Scratch()
        self.layers: dict[int, BoundLatents] = {}
        # A multiple of 64 tokens for the usual block sizes, so that those give equal bits.
        self.granule = -(-TILE // ctx.block_size) * ctx.block_size if ctx.batch_invariant else ctx.block_size

    def kv_spec(self, layer: LayerSpec) -> KVSpec:
        return latent_spec(layer, self.ctx)

    def bind(self, layers: Sequence[LayerSpec], kv: Sequence[Tensor]) -> None:
        self.layers = {spec.index: BoundLatents.bind(spec, tensor) for spec, tensor in zip(layers, kv, strict=True)}

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def release(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def plan(self, batch: InputBatch, group: int) -> LatentPlan:
        """The step's plan. Reads lengths and the block table on the host, where they are."""
        return MlaPlan(self, StepRows.of(batch, group, self.ctx.block_size), batch.slot_mapping[group])


class MlaPlan:
    """One step's attention over one group of latent layers: `interfaces.LatentPlan`."""

    def __init__(self, owner: MlaTorch, rows: StepRows, slots: Tensor) -> None:
        self._owner, self._rows, self._slots = owner, rows, slots
        self._fresh = rows.fresh_blocks(owner.ctx.block_size)
        self._divisions: dict[Widths, Division] = {}

    def forward_latent(self, layer: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        bound = self._owner.layers[layer]
        if self._fresh is not None:
            bound.kv.index_fill_(0, self._fresh, 0)
        bound.slots.index_copy_(0, self._slots, latent)
        assert bound.spec.value_dim is not None
        rank, num_nope = bound.spec.value_dim, up.keys.shape[1]
        widths = Widths(bound.spec.num_heads, rank, bound.spec.head_dim - rank, num_nope, up.values.shape[1])
        division = self._divisions.get(widths)
        if division is None:
            division = self._divisions[widths] = Division(self._owner, self._rows, len(self._slots), widths, bound)
        return division(bound, q, latent, up)


class Division:
    """Which queries of a step are absorbed and which requests are expanded, for layers of one shape.

    Spans and masks are made once a step; the first layer pays for all of them.
    """

    def __init__(self, owner: MlaTorch, rows: StepRows, num_tokens: int, widths: Widths, bound: BoundLatents) -> None:
        self._num_tokens, self._widths = num_tokens, widths
        is_real = (rows.query_lens > 0) & (rows.seq_lens > 0)
        is_expanded = is_real & is_cheaper_expanded(rows.query_lens, rows.seq_lens, widths)
        if owner.ctx.batch_invariant:
            is_expanded = np.zeros_like(is_real)
        together = np.flatnonzero(is_real & ~is_expanded)
        tokens = rows.tokens(together)
        self._tokens = None if len(tokens) == num_tokens else torch.from_numpy(tokens)
        form = FixedTogether if owner.ctx.batch_invariant else Together
        self._together = form(owner, rows.pick(together), widths, bound) if len(tokens) else None
        self._alone = [Alone(owner, rows, int(row), widths) for row in np.flatnonzero(is_expanded)]

    def __call__(self, bound: BoundLatents, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """q [T, H, nope + rope], latent [T, rank + rope] -> [T, H, value]; 0 for padding."""
        if self._tokens is None and self._together is not None:
            return self._together(bound, q, up)
        out = q.new_zeros(self._num_tokens, self._widths.heads, self._widths.value)
        if self._together is not None and self._tokens is not None:
            out.index_copy_(0, self._tokens, self._together(bound, q.index_select(0, self._tokens), up))
        for one in self._alone:
            one(bound, q, latent, up, out)
        return out


class Together:
    """Absorbed queries of some requests, in spans of one product each."""

    def __init__(self, owner: MlaTorch, rows: StepRows, widths: Widths, bound: BoundLatents) -> None:
        self._widths = widths
        limits = Limits(owner.ctx.block_size, owner.granule, widths.heads, None)
        most = _MAX_GATHERED_BYTES // (widths.kept * bound.kv.element_size())
        spans = [span for part in rows.parts(most) for span in part.spans(limits)]
        self._products = [SpanLatents(owner, span, widths, bound) for span in spans]
        order = np.concatenate([span.tokens for span in spans])
        is_batch_order = bool((order == np.arange(len(order))).all())
        self._order = None if is_batch_order else torch.from_numpy(order)

    def __call__(self, bound: BoundLatents, q: Tensor, up: LatentUp) -> Tensor:
        """[n, H, nope + rope] -> [n, H, value] of the requests' tokens, side by side."""
        queries = self._absorb(q, up)
        if self._order is not None:
            queries = queries.index_select(0, self._order)
        parts = queries.split([product.num_tokens for product in self._products])
        outs = [product(bound, part) for product, part in zip(self._products, parts, strict=True)]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if self._order is not None:
            out = torch.empty_like(out).index_copy_(0, self._order, out)
        return self._release(out, up)

    def _absorb(self, q: Tensor, up: LatentUp) -> Tensor:
        return absorb(q, up)

    def _release(self, attended: Tensor, up: LatentUp) -> Tensor:
        return release(attended, up)


class FixedTogether(Together):
    """The same with the bits of a token depending on its own request only."""

    def __init__(self, owner: MlaTorch, rows: StepRows, widths: Widths, bound: BoundLatents) -> None:
        super().__init__(owner, rows, widths, bound)
        dtype = owner.ctx.dtype
        self._pad = max(row_padding(dtype, widths.rank, width) for width in (widths.nope, widths.value))

    def _absorb(self, q: Tensor, up: LatentUp) -> Tensor:
        return torch.cat([absorb(part, up)[:n] for part, n in self._padded(q)])

    def _release(self, attended: Tensor, up: LatentUp) -> Tensor:
        return torch.cat([release(part, up)[:n] for part, n in self._padded(attended)])

    def _padded(self, x: Tensor) -> list[tuple[Tensor, int]]:
        """Pieces of x [n, H, D] of at most _MAX_ROWS rows, padded, and how many rows of each count."""
        pieces = x.split(_MAX_ROWS)
        return [(functional.pad(one, (0, 0, 0, 0, 0, -len(one) % self._pad)), len(one)) for one in pieces]


class SpanLatents:
    """One span's product over latents, gathered or where they lie: built once a step, called once a layer."""

    def __init__(self, owner: MlaTorch, span: Span, widths: Widths, bound: BoundLatents) -> None:
        self.num_tokens, self._rank = len(span.tokens), widths.rank
        requests, columns = span.blocks.shape
        self._shape = (requests, columns * owner.ctx.block_size, widths.kept)
        self._rows, self._first = span.blocks.flatten(), int(span.blocks[0, 0]) * owner.ctx.block_size
        is_fixed = owner.ctx.batch_invariant
        self._lies_together = not is_fixed and requests == 1 and bool((self._rows.diff() == 1).all())
        if not self._lies_together:
            self._gathered = owner.scratch.take("latents", bound.kv.dtype, len(self._rows), bound.blocks.shape[1])
        self._attend: Absorbed | Tiled
        if is_fixed:
            pad = row_padding(bound.kv.dtype, widths.kept, owner.granule)
            shape, latents = Shape(1, requests, span.num_queries, widths.heads, widths.kept), self._latents(bound)
            self._attend = Tiled(shape, latents, latents, span.mask, owner.scratch, tile=owner.granule, pad=pad)
        else:
            self._attend = Absorbed(span.mask, bound.kv.dtype, widths.heads, widths.rank, owner.scratch)

    def __call__(self, bound: BoundLatents, q: Tensor) -> Tensor:
        """[n * t, H, rank + rope] -> [n * t, H, rank]."""
        latents = self._latents(bound)
        if isinstance(self._attend, Absorbed):
            return self._attend(q, latents, bound.scoring)
        return self._attend(q, bound.scoring)[..., : self._rank]

    def _latents(self, bound: BoundLatents) -> Tensor:
        """[n, L, rank + rope] of this layer."""
        if self._lies_together:
            return bound.slots[self._first : self._first + self._shape[1]].unsqueeze(0)
        torch.index_select(bound.blocks, 0, self._rows, out=self._gathered)
        return self._gathered.view(self._shape)


class Alone:
    """One request's tokens against expanded keys: its own causally, then its context in pieces."""

    def __init__(self, owner: MlaTorch, rows: StepRows, row: int, widths: Widths) -> None:
        self._scratch = owner.scratch
        self._start, self._count = int(rows.starts[row]), int(rows.query_lens[row])
        context = int(rows.seq_lens[row]) - self._count
        block_size = owner.ctx.block_size
        most = _MAX_EXPANDED // (widths.heads * (widths.key + widths.value))
        self._step = max(1, max(most, _MIN_PIECE) // block_size) * block_size
        self._pieces = [_Piece.of(rows.tables[row], begin, end, block_size) for begin, end in cut(context, self._step)]
        self._queries = max(1, _MAX_SCORES // (widths.heads * self._step))

    def __call__(self, bound: BoundLatents, q: Tensor, latent: Tensor, up: LatentUp, out: Tensor) -> None:
        """Fills the request's rows of out [T, H, value]."""
        mine = slice(self._start, self._start + self._count)
        q = q[mine].transpose(0, 1)
        sums = Partial.nothing(q, *q.shape[:2], out.shape[-1])
        for begin, end in cut(self._count, self._step):
            self._attend_own(q, latent[mine][begin:end], begin, up, sums, bound.spec.scale)
        for piece in self._pieces:
            keys, values = expand(piece.gather(bound, self._scratch), up, self._scratch)
            for first, last in cut(self._count, self._queries):
                _add(sums, first, last, attend(q[:, first:last], keys, values, bound.spec.scale))
        out[mine] = sums.out.transpose(0, 1)

    def _attend_own(self, q: Tensor, latents: Tensor, begin: int, up: LatentUp, sums: Partial, scale: float) -> None:
        """Queries from `begin` on against the keys of tokens begin .. begin + len(latents)."""
        keys, values = expand(latents, up, self._scratch)
        for first, last in cut(self._count - begin, self._queries):
            seen = min(last, len(latents))
            mask = None
            if first < len(latents):
                mask = causal_mask(last - first, seen, first, sums.lse.dtype)
            part = attend(q[:, begin + first : begin + last], keys[:, :seen], values[:, :seen], scale, mask)
            _add(sums, begin + first, begin + last, part)


def _add(sums: Partial, first: int, last: int, part: Partial) -> None:
    merge_into(Partial(sums.out[:, first:last], sums.lse[:, first:last]), part)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of a context: `length` of those in the blocks named by rows [n]."""

    rows: Tensor
    length: int

    @classmethod
    def of(cls, table: Ints, begin: int, end: int, block_size: int) -> _Piece:
        """begin is the first of a block."""
        return cls(torch.from_numpy(table[begin // block_size : -(-end // block_size)].copy()), end - begin)

    def gather(self, bound: BoundLatents, scratch: Scratch) -> Tensor:
        """[length, rank + rope], valid until the next call."""
        gathered = scratch.take("latents", bound.kv.dtype, len(self.rows), bound.blocks.shape[1])
        torch.index_select(bound.blocks, 0, self.rows, out=gathered)
        return gathered.view(-1, bound.kv.shape[-1])[: self.length]
