"""The attention plugin `flash_attn`: the kernels of the package flash-attn over pages of 256 tokens.

A step in which every row computes one token is one call of the library a layer, whose arguments are device tensors or
follow from the number of rows, so that it can be captured. Any other step is one call with spans of many lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import InputBatch
from framework.interfaces import AttentionCaps, AttentionContext, AttentionPlan, KVSpec, LayerSpec
from framework_attention.libraries import library
from framework_attention.pages import Pages, paged_spec, with_padding


class FlashAttn:
    """Paged attention over one KV group by flash-attn, written for 2.8.3. Takes no options.

    The library reads no key behind a row's length, whatever lies there, and gives 0 for rows of length 0. What it
    serves: devices from Ampere on, bfloat16 and float16, pages of a multiple of 256 tokens. Only whole blocks are
    shared by the prefix cache, so that shorter prefixes are computed anew.
    Source: FlashAttention-2 (arXiv 2307.08691).
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        block_sizes=(256, 512),
        head_dims=tuple(range(8, 257, 8)),  # it would pad others, the whole memory at each call
        dtypes=("bfloat16", "float16"),
        graph="decode",
        window=True,
        softcap=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: AttentionContext) -> None:
        """Raises PluginError when the library does not load."""
        self.library = library("flash_attn", "flash_attn")
        self.block_size = ctx.block_size
        self.layers: dict[int, Pages] = {}
        self._ctx = ctx

    def kv_spec(self, layer: LayerSpec) -> KVSpec:
        return paged_spec(layer, self._ctx)

    def bind(self, layers: Sequence[LayerSpec], kv: Sequence[Tensor]) -> None:
        self.layers = {spec.index: Pages(spec, memory) for spec, memory in zip(layers, kv, strict=True)}

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def release(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def plan(self, batch: InputBatch, group: int) -> AttentionPlan:
        """Gathers the rows' pages; reads host twins alone, and waits for nothing."""
        scheduled, slots = batch.num_scheduled_tokens_np, batch.slot_mapping[group]
        table = _pages_of_rows(batch, group, self.block_size)
        if len(slots) == len(scheduled) and bool((scheduled == 1).all()):
            return Decodes(self, slots, table, batch.seq_lens.to(torch.int32))
        return Spans(self, slots, table, batch)


def _pages_of_rows(batch: InputBatch, group: int, block_size: int) -> Tensor:
    """[R, pages] int32 by batch row, as many pages as the longest row may have."""
    longest = int(batch.seq_lens_max_np.max(initial=1))
    held = batch.block_table[group][:, : -(-longest // block_size)]
    return held.index_select(0, batch.idx_mapping)


def _masked(spec: LayerSpec) -> dict[str, Any]:
    """Arguments that both functions of the library share. Its window counts the keys before a query's own, and it reads
    no page that is wholly behind one. Its soft cap is 0 for none."""
    window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    return {"softmax_scale": spec.scale, "causal": True, "window_size": window, "softcap": spec.softcap or 0.0}


class Decodes:
    """A step in which every row computes one token. table [R, pages] int32, lengths [R] int32, 0 for padding rows."""

    def __init__(self, owner: FlashAttn, slots: Tensor, table: Tensor, lengths: Tensor) -> None:
        self._owner, self._slots, self._table, self._lengths = owner, slots, table, lengths

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = self._owner.layers[layer]
        # Not in the library's call: that would give padding rows a key to read.
        pages.write(self._slots, k, v)
        out: Tensor = self._owner.library.flash_attn_with_kvcache(
            q.unsqueeze(1),
            pages.keys,
            pages.values,
            cache_seqlens=self._lengths,
            block_table=self._table,
            **_masked(pages.spec),
        )
        return out.squeeze(1)


class Spans:
    """A step with spans of any lengths. table [R, pages] int32."""

    def __init__(self, owner: FlashAttn, slots: Tensor, table: Tensor, batch: InputBatch) -> None:
        scheduled = batch.num_scheduled_tokens_np
        self._owner, self._slots, self._table = owner, slots, table
        self._num_tokens = int(scheduled.sum())
        # At 1 the library takes it that the tokens are as many as the rows, and padding rows have none.
        self._most_queries = max(2, int(scheduled.max(initial=0)))
        self._most_keys = int(batch.seq_lens_max_np.max(initial=1))
        self._query_starts = batch.query_start_loc.to(torch.int32)
        self._key_starts = torch.zeros_like(self._query_starts)
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=self._key_starts[1:])

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = self._owner.layers[layer]
        pages.write(self._slots, k, v)
        if not self._num_tokens:
            return torch.zeros_like(q)
        out = self._owner.library.flash_attn_varlen_func(
            q[: self._num_tokens],
            pages.keys,
            pages.values,
            cu_seqlens_q=self._query_starts,
            cu_seqlens_k=self._key_starts,
            max_seqlen_q=self._most_queries,
            max_seqlen_k=self._most_keys,
            block_table=self._table,
            **_masked(pages.spec),
        )
        return with_padding(out, len(q))
