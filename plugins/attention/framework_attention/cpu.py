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

from framework.batch import InputBatch
from framework.errors import ConfigError
from framework.interfaces import AttentionCaps, AttentionContext, AttentionPlan, KVSpec, LayerSpec
from framework_attention.products import TILE, Dense, Scratch, Shape, Tiled, row_padding
from framework_attention.spans import Limits, Span, plan_spans


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer with its KV memory, in the two shapes that it is read and written in.

    kv      [2, Hk, num_blocks, block_size, D]
    blocks  [2 * Hk * num_blocks, block_size * D], the same memory: a row is a block of one head
    slots   [2, Hk, num_blocks * block_size, D], the same memory: slot_mapping indexes dimension 2
    """

    spec: LayerSpec
    kv: Tensor
    blocks: Tensor
    slots: Tensor

    @classmethod
    def bind(cls, spec: LayerSpec, kv: Tensor) -> BoundLayer:
        two, heads, num_blocks, block_size, dim = kv.shape
        blocks = kv.view(two * heads * num_blocks, block_size * dim)
        return cls(spec, kv, blocks, kv.view(two, heads, num_blocks * block_size, dim))


class CpuAttention:
    """Paged attention over one KV group on the CPU. Takes no options. Source: PagedAttention (SOSP'23), section 4.1."""

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        block_sizes=(16, 8, 32, 64, 128), any_block_size=True, window=True, batch_invariant=True
    )

    def __init__(self, options: Mapping[str, Any], ctx: AttentionContext) -> None:
        self._ctx = ctx
        self._scratch = Scratch()
        self._layers: dict[int, BoundLayer] = {}
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
        self._limits = Limits(self._ctx.block_size, self._granule, num_heads, windows.pop())
        if self._ctx.batch_invariant:
            dims = {layer.head_dim for layer in layers}
            pad = max(row_padding(self._ctx.dtype, dim, self._granule) for dim in dims)
            self._form = partial(Tiled, tile=self._granule, pad=pad)

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def release(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def plan(self, batch: InputBatch, group: int) -> AttentionPlan:
        """The step's plan. Reads seq_lens, query_start_loc and the block table on the host, where they are."""
        return CpuPlan(self, batch, group)


class SpanProduct:
    """One span's gather and product, in scratch memory: built once a step, called once a layer of one shape.

    Consecutive blocks are copied like any others: a batched product copies a view that is strided over the heads, and
    does so more slowly.
    """

    def __init__(self, bound: BoundLayer, span: Span, form: Callable[..., Dense | Tiled], scratch: Scratch) -> None:
        _, heads, num_blocks, block_size, dim = bound.kv.shape
        requests, columns = span.blocks.shape
        offsets = torch.arange(2 * heads).unsqueeze(1) * num_blocks
        self._rows = (offsets + span.blocks.view(1, -1)).view(-1)
        self._gathered = scratch.take("keys", bound.kv.dtype, len(self._rows), block_size * dim)
        keys, values = self._gathered.view(2, heads * requests, columns * block_size, dim)
        shape = Shape(heads, requests, span.num_queries, bound.spec.num_heads // heads, dim)
        self._attend = form(shape, keys, values, span.mask, scratch)

    def __call__(self, bound: BoundLayer, q: Tensor) -> Tensor:
        """[n * t, Hq, D] -> the same shape, for the span's query tokens."""
        torch.index_select(bound.blocks, 0, self._rows, out=self._gathered)
        return self._attend(q, bound.spec.scale)


class CpuPlan:
    """One step's attention over one KV group."""

    def __init__(self, owner: CpuAttention, batch: InputBatch, group: int) -> None:
        rows = batch.rows_np
        query_lens = batch.num_scheduled_tokens_np.astype(np.int64)
        seq_lens = batch.seq_lens.numpy()[: len(rows)].astype(np.int64)
        starts = batch.query_start_loc.numpy()[: len(rows)].astype(np.int64)
        columns = -(-int(seq_lens.max(initial=1)) // owner._ctx.block_size)
        tables = batch.block_table[group].numpy()[rows, :columns].astype(np.int64)
        self._layers, self._scratch, self._form = owner._layers, owner._scratch, owner._form
        self._slots = batch.slot_mapping[group]
        self._spans = plan_spans(starts, query_lens, seq_lens, tables, owner._limits)
        self._fresh = _fresh_blocks(query_lens, seq_lens, tables, owner._ctx.block_size)
        self._order, self._inverse = _token_order(self._spans, len(self._slots))
        self._products: dict[tuple[int, int, int, int], SpanProduct] = {}

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
            product = self._products[key] = SpanProduct(bound, self._spans[index], self._form, self._scratch)
        return product(bound, q)

    def _write(self, bound: BoundLayer, k: Tensor, v: Tensor) -> None:
        if self._fresh is not None:
            bound.kv.index_fill_(2, self._fresh, 0)
        bound.slots[0].index_copy_(1, self._slots, k.transpose(0, 1))
        bound.slots[1].index_copy_(1, self._slots, v.transpose(0, 1))


def _token_order(spans: Sequence[Span], num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """The order in which spans name the tokens, padding last, and its inverse; None for both when it is the batch's."""
    order = np.concatenate([span.tokens for span in spans] or [np.empty(0, np.int64)])
    if len(order) < num_tokens:
        order = np.concatenate((order, np.setdiff1d(np.arange(num_tokens), order)))
    if (order == np.arange(num_tokens)).all():
        return None, None
    return torch.from_numpy(order), torch.from_numpy(np.argsort(order))


def _fresh_blocks(query_lens: Any, seq_lens: Any, tables: Any, block_size: int) -> Tensor | None:
    """Blocks whose first token this step writes and whose last it does not, None when there are none.

    They are zeroed before the write: a value left there by an earlier owner is masked, but a NaN or an infinity of his
    would still spoil the products.
    """
    last = np.maximum(seq_lens - 1, 0) // block_size
    is_fresh = (seq_lens % block_size != 0) & (last * block_size >= seq_lens - query_lens) & (query_lens > 0)
    blocks = tables[np.flatnonzero(is_fresh), last[is_fresh]]
    return torch.from_numpy(blocks) if len(blocks) else None
