"""The attention plugin `triton`: what a step launches, chosen from host twins alone.

A step of decodes is one launch of `items` and one of `decode` a layer, with shapes fixed by the number of rows, so that
it can be captured. Any other step writes its keys and values first (`write`), then attends decodes and prompts in a
launch each; one whole prompt as long as a step may be goes through a `library`. With `batch_invariant` every query goes
through `prompt` with tiles of one shape. A ragged step is such another one, launched for the most that any split of its
tokens needs, so that it can be captured as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from framework.batch import InputBatch
from framework.errors import ConfigError
from framework.interfaces import (
    AttentionCaps,
    AttentionContext,
    AttentionPlan,
    HeadNorms,
    KVSpec,
    LayerSpec,
    Rotation,
)
from framework_attention.triton.decode import Paged, decode_kernel
from framework_attention.triton.heads import Projected, Turning
from framework_attention.triton.items import WIDTH, StepRows, items_kernel, listed_rows
from framework_attention.triton.library import WholePrompt
from framework_attention.triton.merge import Parts
from framework_attention.triton.prompt import prompt_kernel
from framework_attention.triton.shapes import PromptShape, decode_shape, invariant_shape, prompt_shape
from framework_attention.triton.write import turn_kernel, write_kernel

_PLAIN = Turning(None, None, None, 0.0)
_MERGED_VALUES = 8192  # float32 that a program merges at a time: 64 registers of each of 128 threads

_WRITTEN_VALUES = 2048  # of keys, and as many of values, that a program of `write_kernel` moves


@dataclass(frozen=True, slots=True)
class Work:
    """What a step is launched for: items and tiles, the programs that items are cut for, and keys of the longest
    prompt, about. Of a ragged step the most that there may be."""

    num_items: int
    programs: int
    num_tiles: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with its KV memory [num_blocks, 2, Hk, block_size, D]."""

    spec: LayerSpec
    kv: Tensor

    @property
    def group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads


class TritonAttention:
    """Paged attention over one KV group on a CUDA device. Takes no options.

    KV memory is [num_blocks, 2, kv_heads, block_size, head_dim]: a block of a head is one piece. Blocks of 32 are the
    default: a tile of `decode` is one block then, and small batches are a tenth faster than with blocks of 16.
    Launches of one instance must be on one stream: programs of a launch count their parts in memory that all share.
    Sources: PagedAttention (SOSP'23), section 4; FlashAttention-2 (arXiv 2307.08691), section 3; Flash-Decoding.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        block_sizes=(32, 16, 64, 128),
        any_block_size=True,
        graph="always",
        window=True,
        softcap=True,
        sinks=True,
        batch_invariant=True,
    )

    def __init__(self, options: Mapping[str, Any], ctx: AttentionContext) -> None:
        """Raises ConfigError where the backend's tensors are not on a CUDA device."""
        device = ctx.backend.device
        self._is_interpreted = bool(triton.knobs.runtime.interpret)
        if device.type != "cuda" and not self._is_interpreted:
            raise ConfigError(
                f"attention=triton computes on a CUDA device, and backend={ctx.backend.name} on {device.type}. "
                f"Use attention=cpu, or backend=cuda"
            )
        self._ctx, self._device = ctx, device
        self.dot_f32 = self._is_interpreted or ctx.dtype is torch.float32
        self.lets_begin = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._layers: dict[int, Layer] = {}

    def kv_spec(self, layer: LayerSpec) -> KVSpec:
        shape = (-1, 2, layer.num_kv_heads, self._ctx.block_size, layer.head_dim)
        values = 2 * layer.num_kv_heads * self._ctx.block_size * layer.head_dim
        return KVSpec(shape, self._ctx.dtype, values * self._ctx.dtype.itemsize)

    def bind(self, layers: Sequence[LayerSpec], kv: Sequence[Tensor]) -> None:
        """Raises ConfigError when the layers do not share what a step's plan rests on: one window, one head shape; and
        where the device's programs have too little memory for it."""
        shapes = {(layer.window, layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        if len(shapes) > 1:
            raise ConfigError(
                f"attention=triton: one KV group holds layers of several (window, heads, KV heads, head_dim): "
                f"{sorted(shapes, key=str)}. Give each a group of its own, or use another attention"
            )
        self._layers = {spec.index: Layer(spec, tensor) for spec, tensor in zip(layers, kv, strict=True)}
        ((self._window, self._num_heads, self._kv_heads, self._dim),) = shapes
        self._dim_pad, self._shared_bytes = max(16, triton.next_power_of_2(self._dim)), _shared_bytes(self._device)
        self._group = triton.next_power_of_2(self._num_heads // self._kv_heads)
        self.decode = decode_shape(self._ctx.dtype, self._dim_pad, self._group, self._shared_bytes)
        most = self.max_items(np.full(triton.next_power_of_2(self._ctx.max_num_seqs), self._ctx.max_model_len))
        self.whole = WholePrompt(self._ctx, layers)
        self.arrived = torch.zeros(most, self._kv_heads, dtype=torch.int32, device=kv[0].device)

    def read_keys(self, max_lens: Any) -> Any:
        """Most keys that decodes of at most max_lens [n] keys read: under a window its own and those of a tile more."""
        return max_lens if self._window is None else np.minimum(max_lens, self._window + self.decode.tile)

    def programs(self, max_lens: Any) -> int:
        """How many programs decodes of at most max_lens [n] keys are cut for."""
        num_sms, shape = _num_multiprocessors(self._device), self.decode
        longest = self.read_keys(max_lens).max(initial=0)
        is_few = len(max_lens) * self._kv_heads <= num_sms and longest <= shape.short_keys
        return num_sms * (min(shape.few_per_sm, shape.programs_per_sm) if is_few else shape.programs_per_sm)

    def max_items(self, max_lens: Any) -> int:
        """Most items that decodes of at most max_lens [n] keys give, as `items_kernel` cuts them."""
        by_keys = int(np.maximum(-(-self.read_keys(max_lens) // self.decode.min_keys), 1).sum())
        return min(len(max_lens) + -(-self.programs(max_lens) // self._kv_heads), by_keys)

    def prompt(self, num_keys: int) -> PromptShape:
        """Of a step whose longest prompt has num_keys keys, about; with `batch_invariant` the same for all."""
        if self._ctx.batch_invariant:
            return invariant_shape(self._ctx.dtype, self._dim_pad, self._group, self._shared_bytes)
        return prompt_shape(self._ctx.dtype, self._dim_pad, self._group, self._shared_bytes, num_keys)

    @property
    def tile_queries(self) -> int:
        """Queries of a prompt's tile."""
        return max(1, self.prompt(0).rows // self._group)

    @property
    def least(self) -> int:
        """Fewest queries of a row that count as a prompt."""
        return 1 if self._ctx.batch_invariant else 2

    def counted(self, scheduled: NDArray[np.int32], max_lens: NDArray[np.int32]) -> Work:
        """Of rows that compute scheduled [R] tokens and have at most max_lens [R] keys then."""
        is_prompt = scheduled >= self.least
        decodes = max_lens[(scheduled == 1) & ~is_prompt]
        num_tiles = int((-(-scheduled[is_prompt] // self.tile_queries)).sum())
        longest = int(max_lens[is_prompt].max(initial=0))
        return Work(self.max_items(decodes), self.programs(decodes), num_tiles, longest)

    def bounded(self, num_tokens: int, max_lens: NDArray[np.int32]) -> Work:
        """Of any split of num_tokens tokens over rows of at most max_lens [R] keys, equal for all.

        Each row may be a decode. A prompt's first token brings a tile, and each tile_queries behind it another one.
        """
        decodes = max_lens[: num_tokens if self.least > 1 else 0]
        prompts = min(len(max_lens), num_tokens // self.least)
        num_tiles = prompts + (num_tokens - prompts) // self.tile_queries
        return Work(self.max_items(decodes), self.programs(decodes), num_tiles, num_tokens)

    def prefers_own_shape(self, num_scheduled: NDArray[np.int32], max_lens: NDArray[np.int32]) -> bool:
        """As `PrefersOwnShape`: a whole prompt that the library serves gains more by it than by a captured step."""
        return self.whole.serves(num_scheduled, max_lens, int(num_scheduled.sum()))

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def release(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def plan(self, batch: InputBatch, group: int) -> AttentionPlan:
        """Launches the kernel that lists the step's work; reads host twins alone, and waits for nothing."""
        return TritonPlan(self, batch, group)


class TritonPlan:
    """One step's attention over one KV group. `decodes` tells whether every row computes one token.

    Of a ragged step the host knows no split: nothing is taken for uniform, full or whole, and work is bounded.
    """

    def __init__(self, owner: TritonAttention, batch: InputBatch, group: int) -> None:
        scheduled = batch.num_scheduled_tokens_np
        self._owner, self._batch = owner, batch
        self._table, self._slots = batch.block_table[group], batch.slot_mapping[group]
        num_rows, num_tokens = len(scheduled), len(self._slots)
        max_lens = batch.seq_lens_max_np
        is_told = not batch.ragged
        self._is_uniform = is_told and num_tokens == num_rows and bool((scheduled == 1).all())
        self.decodes = self._is_uniform and not owner._ctx.batch_invariant
        self._is_full = is_told and num_tokens == int(scheduled.sum())
        self._is_whole = is_told and owner.whole.serves(scheduled, max_lens, num_tokens)
        work = owner.counted(scheduled, max_lens) if is_told else owner.bounded(num_tokens, max_lens)
        self._num_items, self._programs, self._num_tiles = work.num_items, work.programs, work.num_tiles
        self._prompt = owner.prompt(work.num_keys)
        if self._num_items or self._num_tiles:
            self._list_work(num_rows)

    def _list_work(self, num_rows: int) -> None:
        owner, batch, decode = self._owner, self._batch, self._owner.decode
        device = self._slots.device
        assert self._num_items <= len(owner.arrived), f"{self._num_items} items, {len(owner.arrived)} counters"
        self._items = torch.empty(max(self._num_items, 1), WIDTH, dtype=torch.int32, device=device)
        self._tiles = torch.empty(max(self._num_tiles, 1), WIDTH, dtype=torch.int32, device=device)
        starts = None if self._is_uniform else batch.query_start_loc
        items_kernel[(1,)](
            StepRows(batch.seq_lens, batch.idx_mapping, starts), num_rows, self._items, self._num_items, self._tiles,
            self._num_tiles, self._programs, _num_multiprocessors(device), KV_HEADS=owner._kv_heads,
            GOOD_KEYS=decode.good_keys, MIN_KEYS=decode.min_keys, TILE=decode.tile, WINDOW=owner._window or 0,
            QUERIES=owner.tile_queries if self._num_tiles else 0, LEAST=owner.least,
            ROWS=listed_rows(num_rows if self._is_uniform else owner._ctx.max_num_seqs), BLOCK=256,
        )  # fmt: skip
        shape = (self._num_items, owner._num_heads)
        self._parts = Parts(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty((*shape, owner._dim), dtype=torch.float32, device=device),
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = self._projected(_dense(q), _dense(k), _dense(v))
        return self._attend(self._owner._layers[layer], new, _PLAIN, None)

    def forward_projections(
        self, layer: int, heads: Tensor, rotation: Rotation | None, norms: HeadNorms | None
    ) -> Tensor:
        """As `TakesProjections`. rotation.positions are those of the batch: a decode's is its length less one."""
        bound, heads = self._owner._layers[layer], _dense(heads)
        q, k, v = heads.split((bound.spec.num_heads, bound.spec.num_kv_heads, bound.spec.num_kv_heads), dim=1)
        table, positions = (None, None) if rotation is None else (rotation.table, rotation.positions)
        turning = Turning(table, None, None, 0.0)
        if norms is not None:
            turning = Turning(table, norms.q_weight, norms.k_weight, norms.eps)
        return self._attend(bound, self._projected(q, k, v), turning, positions)

    def _projected(self, q: Tensor, k: Tensor, v: Tensor) -> Projected:
        return Projected(q, k, v, q.stride(0), k.stride(0), v.stride(0), self._slots)

    def _attend(self, bound: Layer, new: Projected, turning: Turning, positions: Tensor | None) -> Tensor:
        if self._is_whole and turning.changes:
            return self._attend_whole(bound, new, turning, positions)
        out = torch.empty(new.q.shape, dtype=new.q.dtype, device=new.q.device)
        if self.decodes:
            self._attend_decodes(bound, new, turning, out)
            return out
        if not self._is_full:
            out.zero_()
        keys = torch.empty(new.k.shape, dtype=new.k.dtype, device=new.k.device) if turning.changes else new.k
        self._write(bound, new, turning, positions, keys)
        if self._num_items:
            self._attend_decodes(bound, new, turning, out)
        if self._num_tiles:
            self._attend_prompts(bound, new, turning, keys, out)
        return out

    def _paged(self, bound: Layer) -> Paged:
        return Paged(bound.kv, self._table)

    def _attend_decodes(self, bound: Layer, new: Projected, turning: Turning, out: Tensor) -> None:
        owner, spec, shape, group = self._owner, bound.spec, self._owner.decode, self._owner._group
        merge = max(1, min(32, _MERGED_VALUES // (group * owner._dim_pad)))
        decode_kernel[(self._num_items * spec.num_kv_heads,)](
            new, turning, self._paged(bound), self._table.stride(0), self._items, self._parts, owner.arrived, out,
            spec.scale, spec.sinks,
            KV_HEADS=spec.num_kv_heads, GROUP=bound.group, ROWS=max(16, group), DIM=spec.head_dim,
            DIM_PAD=owner._dim_pad, BLOCK_SIZE=bound.kv.shape[3], TILE=shape.tile, WINDOW=spec.window or 0,
            SOFTCAP=spec.softcap or 0.0, MERGE=merge, DOT_F32=owner.dot_f32, LETS_BEGIN=owner.lets_begin,
            num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip

    def _attend_prompts(self, bound: Layer, new: Projected, turning: Turning, keys: Tensor, out: Tensor) -> None:
        owner, spec, shape, group = self._owner, bound.spec, self._prompt, self._owner._group
        prompt_kernel[(self._num_tiles * spec.num_kv_heads,)](
            new, turning, *self._own(keys, new.v), self._paged(bound), self._table.stride(0), self._tiles, out,
            spec.scale, spec.sinks,
            KV_HEADS=spec.num_kv_heads, GROUP=bound.group, GROUP_PAD=group, ROWS=owner.tile_queries * group,
            DIM=spec.head_dim, DIM_PAD=owner._dim_pad, BLOCK_SIZE=bound.kv.shape[3], TILE=shape.tile,
            WINDOW=spec.window or 0, SOFTCAP=spec.softcap or 0.0, DOT_F32=owner.dot_f32, num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )  # fmt: skip

    def _attend_whole(self, bound: Layer, new: Projected, turning: Turning, positions: Tensor | None) -> Tensor:
        keys = torch.empty(new.k.shape, dtype=new.k.dtype, device=new.k.device)
        self._write(bound, new, turning, positions, keys)
        queries = self._turned_queries(bound, new, turning, positions)
        return self._owner.whole(queries, keys, new.v, bound.spec.scale)

    def _turned_queries(self, bound: Layer, new: Projected, turning: Turning, positions: Tensor | None) -> Tensor:
        owner, num_tokens = self._owner, len(new.q)
        heads = triton.next_power_of_2(bound.spec.num_heads)
        rows = max(heads, _WRITTEN_VALUES // owner._dim_pad)
        out = torch.empty(new.q.shape, dtype=new.q.dtype, device=new.q.device)
        turn_kernel[(triton.cdiv(num_tokens * heads, rows),)](
            new, turning, positions, num_tokens, out,
            HEADS=bound.spec.num_heads, HEADS_PAD=heads, ROWS=rows, DIM=owner._dim, DIM_PAD=owner._dim_pad,
        )  # fmt: skip
        return out

    @property
    def _reads_own(self) -> bool:
        """Whether prompts read the step's keys where they lie. Not so where all are to be read from blocks: for bits
        that do not depend on the step, with padded tiles, and in float32, whose products leave no registers for a
        second loop."""
        owner = self._owner
        is_padded = owner._dim != owner._dim_pad
        return not (owner._ctx.batch_invariant or is_padded or owner._ctx.dtype is torch.float32)

    def _own(self, k: Tensor, v: Tensor) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
        """Descriptors of the step's keys, as they are in the cache, and values."""
        if not self._reads_own:
            return None, None
        tile = [self._prompt.tile, self._owner._dim]
        shape = [len(k), self._owner._kv_heads * self._owner._dim]
        own_k = TensorDescriptor(k, shape, [k.stride(0), 1], tile)
        return own_k, TensorDescriptor(v, shape, [v.stride(0), 1], tile)

    def _write(self, bound: Layer, new: Projected, turning: Turning, positions: Tensor | None, keys: Tensor) -> None:
        spec, owner = bound.spec, self._owner
        heads, num_tokens = triton.next_power_of_2(spec.num_kv_heads), len(self._slots)
        rows = max(heads, _WRITTEN_VALUES // owner._dim_pad)
        write_kernel[(triton.cdiv(num_tokens * heads, rows),)](
            new, turning, positions, num_tokens, keys if self._reads_own and turning.changes else None, bound.kv,
            KV_HEADS=spec.num_kv_heads, HEADS_PAD=heads, ROWS=rows, DIM=spec.head_dim, DIM_PAD=owner._dim_pad,
            BLOCK_SIZE=bound.kv.shape[3],
        )  # fmt: skip


def _dense(heads: Tensor) -> Tensor:
    """heads [T, H, D] with the values of a token in one piece; what a fused product gives is, and is not copied."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def _shared_bytes(device: torch.device) -> int:
    """Of a program on the device; no limit in the interpreter."""
    if device.type != "cuda":
        return 1 << 20
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def _num_multiprocessors(device: torch.device) -> int:
    """Of the device; 4 in the interpreter, which has none and runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
