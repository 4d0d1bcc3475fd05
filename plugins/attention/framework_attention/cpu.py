"""Paged attention in plain torch for the CPU: keys are gathered block by block, then attended by batched products.

Layout of a layer's KV: [2, kv_heads, num_blocks, block_size, head_dim], so that whole blocks are gathered as rows and
come out contiguous a head. `spans` cuts the step, `products` computes; this module binds both to the KV memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from framework.batch import NULL_BLOCK, InputBatch
from framework.errors import ConfigError
from framework.interfaces import AttentionCaps, AttentionContext, AttentionPlan, KVSpec, LayerSpec
from framework_attention.products import TILE, Dense, Scoring, Scratch, Shape, Tiled, row_padding
from framework_attention.spans import Ints, Limits, Span, first_places, fresh_blocks, plan_spans
from framework_attention.steady import NewBlocks, SteadyDecodes

# A fused call a request costs 20 us and 0.1 us a key, a product for all of them some 100 us: measured on two cores.
_MAX_ALONE = 4


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer with its KV memory, in the two shapes that it is read and written in.

    kv      [2, Hk, num_blocks, block_size, D]
    blocks  [2 * Hk * num_blocks, block_size * D], the same memory: a row is a block of one head
    slots   [2, Hk, num_blocks * block_size, D], the same memory: slot_mapping indexes dimension 2
    keys, values  [1, Hk, num_blocks * block_size, D], the two halves of slots
    """

    spec: LayerSpec
    scoring: Scoring
    kv: Tensor
    blocks: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def bind(cls, spec: LayerSpec, kv: Tensor) -> BoundLayer:
        two, heads, num_blocks, block_size, dim = kv.shape
        blocks = kv.view(two * heads * num_blocks, block_size * dim)
        slots = kv.view(two, heads, num_blocks * block_size, dim)
        return cls(spec, Scoring.of(spec), kv, blocks, slots, slots[:1], slots[1:])


class CpuAttention:
    """Paged attention over one KV group on the CPU. Takes no options. Source: PagedAttention (SOSP'23), section 4.1.

    Blocks that no query of a step reads, behind a window, are not touched: they may be another request's.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        block_sizes=(16, 8, 32, 64, 128),
        any_block_size=True,
        window=True,
        softcap=True,
        sinks=True,
        batch_invariant=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: AttentionContext) -> None:
        self._ctx = ctx
        self._scratch = Scratch()
        self._layers: dict[int, BoundLayer] = {}
        self._plans: dict[int, CpuPlan] = {}
        # The tile is a multiple of 64 keys for the usual block sizes, so that those give equal bits.
        self._granule = -(-TILE // ctx.block_size) * ctx.block_size if ctx.batch_invariant else ctx.block_size
        self._form: Callable[..., Dense | Tiled] = Dense

    def kv_spec(self, layer: LayerSpec) -> KVSpec:
        values = 2 * layer.num_kv_heads * self._ctx.block_size * layer.head_dim
        shape = (2, layer.num_kv_heads, -1, self._ctx.block_size, layer.head_dim)
        return KVSpec(shape, self._ctx.dtype, values * self._ctx.dtype.itemsize)

    def bind(self, layers: Sequence[LayerSpec], kv: Sequence[Tensor]) -> None:
        """Raises ConfigError when the layers do not share one window, or when bits cannot be kept fixed here."""
        windows = {layer.window for layer in layers}
        if len(windows) > 1:
            raise ConfigError(
                f"attention=cpu: one KV group holds windows {windows}. Give each window a group of its own."
            )
        self._layers = {spec.index: BoundLayer.bind(spec, tensor) for spec, tensor in zip(layers, kv, strict=True)}
        num_heads = max(layer.num_heads for layer in layers)
        is_plain = all(layer.softcap is None and layer.sinks is None for layer in layers)
        max_alone = _MAX_ALONE if is_plain and not self._ctx.batch_invariant else 0
        self._limits = Limits(self._ctx.block_size, self._granule, num_heads, windows.pop(), max_alone)
        if self._ctx.batch_invariant:
            dims = {layer.head_dim for layer in layers}
            pad = max(row_padding(self._ctx.dtype, dim, self._granule) for dim in dims)
            self._form = partial(Tiled, tile=self._granule, pad=pad)

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def release(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def plan(self, batch: InputBatch, group: int) -> AttentionPlan:
        """The step's plan. Reads seq_lens, query_start_loc and the block table on the host, where they are.

        A step that only goes on with the decodes of the last one gets the same plan, moved on by a token.
        """
        plan = self._plans.get(group)
        if plan is None or not plan.advance(batch, group):
            plan = self._plans[group] = CpuPlan(self, batch, group)
        return plan


class SpanProduct:
    """One span's gather and product, in scratch memory: built once a step, called once a layer of one shape.

    Consecutive blocks are copied like any others: a batched product copies a view that is strided over the heads, and
    does so more slowly.
    """

    def __init__(self, bound: BoundLayer, span: Span, form: Callable[..., Dense | Tiled], scratch: Scratch) -> None:
        _, heads, num_blocks, block_size, dim = bound.kv.shape
        requests, columns = span.blocks.shape
        self._offsets = np.arange(2 * heads)[:, None] * num_blocks
        by_request = self._offsets[:, :, None] + span.blocks.numpy()
        self._by_request, self._rows = by_request, torch.from_numpy(by_request).view(-1)  # the same memory
        self._gathered = scratch.take("keys", bound.kv.dtype, len(self._rows), block_size * dim)
        keys, values = self._gathered.view(2, heads * requests, columns * block_size, dim)
        shape = Shape(heads, requests, span.num_queries, bound.spec.num_heads // heads, dim)
        self._attend = form(shape, keys, values, span.mask, scratch)

    def __call__(self, bound: BoundLayer, q: Tensor) -> Tensor:
        """[n * t, Hq, D] -> the same shape, for the span's query tokens."""
        torch.index_select(bound.blocks, 0, self._rows, out=self._gathered)
        return self._attend(q, bound.scoring)

    def enter(self, new: NewBlocks) -> None:
        """Requests of the span go on in further blocks, or leave some behind."""
        self._by_request[:, new.places, new.columns] = self._offsets + new.blocks


class LoneDecode:
    """One query token of one request: torch's fused attention over its keys, where they lie when its blocks are
    consecutive. Its rounding differs from that of the batched products, and it knows neither soft caps nor sinks."""

    def __init__(self, bound: BoundLayer, span: Span, window: int | None, scratch: Scratch) -> None:
        _, heads, num_blocks, block_size, dim = bound.kv.shape
        blocks = span.blocks[0].numpy()
        self._end, self._window = span.num_keys, window
        self._shape = (1, heads, bound.spec.num_heads // heads, dim)
        self._rows: Tensor | None = None
        self._origin = int(blocks[0]) * block_size
        if len(blocks) > 1 and (np.diff(blocks) != 1).any():
            self._rows = (torch.arange(2 * heads).unsqueeze(1) * num_blocks + span.blocks).view(-1)
            self._gathered = scratch.take("keys", bound.kv.dtype, len(self._rows), block_size * dim)
            self._both = self._gathered.view(2, 1, heads, -1, dim)
        self._cut()

    def __call__(self, bound: BoundLayer, q: Tensor) -> Tensor:
        """[1, Hq, D] -> the same shape."""
        if self._rows is None:
            keys = bound.keys.narrow(2, self._start, self._length)
            values = bound.values.narrow(2, self._start, self._length)
        else:
            torch.index_select(bound.blocks, 0, self._rows, out=self._gathered)
            keys, values = self._keys, self._values
        query = q.view(self._shape)
        return scaled_dot_product_attention(query, keys, values, scale=bound.spec.scale).reshape(q.shape)

    def lengthen(self, by: int) -> None:
        """The request has more keys, in the block of its last one."""
        self._end += by
        self._cut()

    def _cut(self) -> None:
        first = 0 if self._window is None else max(0, self._end - self._window)
        self._start, self._length = self._origin + first, self._end - first
        if self._rows is not None:
            self._keys, self._values = self._both.narrow(3, first, self._length).unbind()


class CpuPlan:
    """One step's attention over one KV group."""

    def __init__(self, owner: CpuAttention, batch: InputBatch, group: int) -> None:
        rows = batch.rows_np
        query_lens = batch.num_scheduled_tokens_np.astype(np.int64)
        seq_lens = batch.seq_lens.numpy()[: len(rows)]
        starts = batch.query_start_loc.numpy()[: len(rows)].copy()
        seq_lens, firsts, tables = _tables(batch, group, query_lens, seq_lens, owner._limits)
        self._layers, self._scratch, self._form = owner._layers, owner._scratch, owner._form
        self._limits = owner._limits
        self._slots = batch.slot_mapping[group]
        self._spans = plan_spans(starts, query_lens, seq_lens, tables, owner._limits)
        self._fresh = fresh_blocks(query_lens, seq_lens, tables, owner._ctx.block_size)
        self._order, self._inverse = _token_order(self._spans, len(self._slots))
        self._products: dict[tuple[int, int, int, int], SpanProduct | LoneDecode] = {}
        self._steady: SteadyDecodes | None = None
        if len(self._slots) == len(rows):
            window = self._limits.window
            self._steady = SteadyDecodes(self._spans, seq_lens, firsts, owner._ctx.block_size, window)

    def advance(self, batch: InputBatch, group: int) -> bool:
        """Moves the plan on to `batch`; False, and nothing has changed, when those decodes do not just go on."""
        if self._steady is None or not batch.goes_on:
            return False
        changed = self._steady.advance(batch, group)
        if changed is None:
            return False
        self._slots = batch.slot_mapping[group]
        for new in changed:
            self._spans[new.span].blocks.numpy()[new.places, new.columns] = new.blocks
            for (index, *_), product in self._products.items():
                if new.span == index and isinstance(product, SpanProduct):
                    product.enter(new)
        for product in self._products.values():
            if isinstance(product, LoneDecode):
                product.lengthen(1)
        entered = [new.blocks for new in changed if not new.is_left]
        self._fresh = torch.from_numpy(np.concatenate(entered)) if entered else None
        return True

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bound = self._layers[layer]
        self._write(bound, k, v)
        if self._order is not None:
            q = q.index_select(0, self._order)
        outs, begin = [], 0
        for i, span in enumerate(self._spans):
            end = begin + len(span.tokens)
            outs.append(self._attend_span(bound, i, q[begin:end]))
            begin = end
        if begin < len(q):
            outs.append(torch.zeros_like(q[begin:]))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._inverse is None else out.index_select(0, self._inverse)

    def _attend_span(self, bound: BoundLayer, index: int, q: Tensor) -> Tensor:
        spec = bound.spec
        key = (index, spec.num_kv_heads, spec.num_heads, spec.head_dim)
        product = self._products.get(key)
        if product is None:
            product = self._products[key] = self._product(bound, self._spans[index])
        return product(bound, q)

    def _product(self, bound: BoundLayer, span: Span) -> SpanProduct | LoneDecode:
        if self._limits.max_alone and len(span.tokens) == 1:
            lone = LoneDecode(bound, span, self._limits.window, self._scratch)
            lone.lengthen(0 if self._steady is None else self._steady.age)  # the spans tell of the plan's first step
            return lone
        return SpanProduct(bound, span, self._form, self._scratch)

    def _write(self, bound: BoundLayer, k: Tensor, v: Tensor) -> None:
        if self._fresh is not None:
            bound.kv.index_fill_(2, self._fresh, 0)
        bound.slots[0].index_copy_(1, self._slots, k.transpose(0, 1))
        bound.slots[1].index_copy_(1, self._slots, v.transpose(0, 1))


def _tables(
    batch: InputBatch, group: int, query_lens: Ints, seq_lens: Ints, limits: Limits
) -> tuple[Ints, Ints | None, Ints]:
    """Readable context [R] and blocks [R, columns] of each row from its first place on, and that place, None for 0.

    Blocks of a prompt that later steps compute hold whatever a former owner left in them, NaN included, and those
    behind a window may be another request's: the null block stands in their place.
    """
    rows, size, table = batch.rows_np, limits.block_size, batch.block_table[group].numpy()
    if limits.window is None:
        num_blocks = -(-seq_lens // size)
        columns = np.arange(num_blocks.max(initial=1))
        tables = table[rows, : len(columns)].astype(np.int64)
        tables[columns >= num_blocks[:, None]] = NULL_BLOCK
        return seq_lens, None, tables
    needed, firsts = first_places(query_lens, seq_lens, limits)
    seq_lens = seq_lens - firsts
    num_blocks = -(-seq_lens // size)
    columns = np.arange(num_blocks.max(initial=1))
    places = (firsts // size)[:, None] + columns
    tables = table[rows[:, None], np.minimum(places, table.shape[1] - 1)].astype(np.int64)
    tables[(columns >= num_blocks[:, None]) | (places < (needed // size)[:, None])] = NULL_BLOCK
    return seq_lens, firsts, tables


def _token_order(spans: Sequence[Span], num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """The order in which spans name the tokens, padding last, and its inverse; None for both when it is the batch's."""
    if len(spans) == 1 and len(spans[0].tokens) == num_tokens:
        return None, None  # one span names its tokens in rising order
    order = np.concatenate([span.tokens for span in spans] or [np.empty(0, np.int64)])
    if len(order) < num_tokens:
        order = np.concatenate((order, np.setdiff1d(np.arange(num_tokens), order)))
    if (order == np.arange(num_tokens)).all():
        return None, None
    return torch.from_numpy(order), torch.from_numpy(np.argsort(order))
