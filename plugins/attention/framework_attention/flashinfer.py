"""The attention plugin `flashinfer`: the kernels of the package flashinfer-python, planned on the host for each step.

A step in which every row computes one token goes through the library's wrapper for decodes, any other one through that
for prompts. Its plan takes lengths from the host, which therefore has to know them when a step is planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from framework.batch import InputBatch
from framework.errors import ConfigError
from framework.interfaces import AttentionCaps, AttentionContext, AttentionPlan, KVSpec, LayerSpec
from framework_attention.libraries import library
from framework_attention.pages import Pages, paged_spec, with_padding

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORKSPACE_BYTES = 128 * 1024 * 1024
"""Partial results of requests that several programs share, as the library's documentation recommends."""


class FlashInfer:
    """Paged attention over one KV group by flashinfer-python, written for 0.6 and 0.7. Takes no options.

    The library compiles a kernel for each kind of step when it first meets it, which takes nvcc or its package
    flashinfer-jit-cache. A wrapper holds one plan at a time, so a step's layers must run before the next step is
    planned, as they do without engine.async_scheduling.
    Source: FlashInfer (arXiv 2501.01005), sections 3.1 and 3.3.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        block_sizes=(16, 32, 64),
        head_dims=(64, 128, 256),
        dtypes=("bfloat16", "float16"),
        graph="never",  # a plan made for other lengths than a step's cuts its work wrongly
        window=True,
        softcap=True,
        needs_exact_lens=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: AttentionContext) -> None:
        """Raises PluginError when the library does not load."""
        module = library("flashinfer", "flashinfer")
        self._ctx = ctx
        # Zeroed: the library wants to find 0 there when it uses the memory first.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=ctx.backend.device)
        # With tensor cores it serves any number of query heads a KV head, without them some few.
        self.decodes = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self.prompts = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self.layers: dict[int, Pages] = {}

    def kv_spec(self, layer: LayerSpec) -> KVSpec:
        return paged_spec(layer, self._ctx)

    def bind(self, layers: Sequence[LayerSpec], kv: Sequence[Tensor]) -> None:
        """Raises ConfigError when the layers do not share what a step's plan holds."""
        shapes = {(one.window, one.num_heads, one.num_kv_heads, one.head_dim, one.scale, one.softcap) for one in layers}
        if len(shapes) > 1:
            raise ConfigError(
                f"attention=flashinfer: one KV group holds layers of several (window, heads, KV heads, head_dim, "
                f"scale, soft cap): {sorted(shapes, key=str)}. Give each a group of its own, or use another attention"
            )
        self.layers = {spec.index: Pages(spec, memory) for spec, memory in zip(layers, kv, strict=True)}
        ((self._window, num_heads, num_kv_heads, head_dim, scale, softcap),) = shapes
        self._shape = (num_heads, num_kv_heads, head_dim, self._ctx.block_size)
        self._words = {
            "window_left": -1 if self._window is None else self._window - 1,  # keys before a query's own
            "logits_soft_cap": softcap,
            "sm_scale": scale,
            "q_data_type": self._ctx.dtype,
            "kv_data_type": self._ctx.dtype,
        }

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def release(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def plan(self, batch: InputBatch, group: int) -> AttentionPlan:
        """Has the library cut the step's work, from the lengths that the host knows."""
        scheduled, slots = batch.num_scheduled_tokens_np, batch.slot_mapping[group]
        num_rows = int(np.count_nonzero(scheduled))
        assert scheduled[:num_rows].all(), f"padding rows stand behind the others, not as in {scheduled.tolist()}"
        if not num_rows:
            return FlashInferPlan(self.layers, None, slots, 0)
        scheduled, lengths = scheduled[:num_rows], batch.seq_lens_max_np[:num_rows]
        size = self._ctx.block_size
        # Under a window a row's pages begin with the first that is read: positions count from the row's end.
        behind = np.maximum(lengths - scheduled - (self._window or lengths.max()) + 1, 0) // size
        num_pages = -(-lengths // size) - behind
        lengths = lengths - behind * size
        pages = (
            _starts(num_pages),
            _indices(batch, group, num_rows, int(num_pages.sum()), size, self._window),
            torch.from_numpy((lengths - (num_pages - 1) * size).astype(np.int32)),  # tokens of the last page
        )
        num_tokens = int(scheduled.sum())
        if num_tokens == num_rows:
            self.decodes.plan(*pages, *self._shape, **self._words)
            return FlashInferPlan(self.layers, self.decodes, slots, num_tokens)
        self.prompts.plan(_starts(scheduled), *pages, *self._shape, causal=True, **self._words)
        return FlashInferPlan(self.layers, self.prompts, slots, num_tokens)


def _starts(counts: NDArray[Any]) -> Tensor:
    """[n + 1] int32 on the host: where each of n pieces begins, and where the last one ends."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts)


def _indices(batch: InputBatch, group: int, num_rows: int, total: int, block_size: int, window: int | None) -> Tensor:
    """[total] int32: the pages of the first num_rows rows, each from the first that is read on, one row's behind the
    other's. Waits for nothing."""
    lengths = batch.seq_lens[:num_rows]
    behind = torch.zeros_like(lengths)
    if window is not None:
        is_uniform = len(batch.input_ids) == num_rows
        scheduled = 1 if is_uniform else batch.query_start_loc[: num_rows + 1].diff()
        behind = (lengths - scheduled - window + 1).clamp(min=0) // block_size
    held = (lengths + block_size - 1) // block_size - behind
    row = torch.repeat_interleave(held, output_size=total)
    column = torch.arange(total, device=held.device) - (held.cumsum(0) - held - behind)[row]
    return batch.block_table[group][batch.idx_mapping[row], column]


class FlashInferPlan:
    """One step. wrapper: the library's, which holds the plan, None for a step of padding alone."""

    def __init__(self, layers: Mapping[int, Pages], wrapper: Any, slots: Tensor, num_tokens: int) -> None:
        self._layers, self._wrapper, self._slots, self._num_tokens = layers, wrapper, slots, num_tokens

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = self._layers[layer]
        pages.write(self._slots, k, v)
        if self._wrapper is None:
            return torch.zeros_like(q)
        queries = q[: self._num_tokens].contiguous()
        return with_padding(self._wrapper.run(queries, (pages.keys, pages.values)), len(q))
