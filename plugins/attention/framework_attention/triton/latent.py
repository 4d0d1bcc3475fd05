"""The attention plugin `mla_triton`: latent attention on a CUDA device, launched from host twins alone.

A step of decodes absorbs its queries and is three launches a layer, whose shapes the number of rows fixes, so that it
can be captured. Short chunks are absorbed too, each token as a query of its own, and so is every query of
`batch_invariant`: one query is one part then, and always meets the same operations. Longer prompts are expanded into
keys and values of each head (`latent_prompt`). What a step computes is listed on the device by `latent_items`.
Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1; Flash-Decoding; PagedAttention (SOSP'23), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import triton
from torch import Tensor

from framework.batch import InputBatch
from framework.errors import ConfigError
from framework.interfaces import (
    AttentionCaps,
    AttentionContext,
    KVSpec,
    LatentNorm,
    LatentPlan,
    LatentUp,
    LayerSpec,
    Rotation,
)
from framework_attention.pages import latent_spec
from framework_attention.triton.attention import _num_multiprocessors, _shared_bytes
from framework_attention.triton.heads import Turning
from framework_attention.triton.latent_decode import latent_decode_kernel
from framework_attention.triton.latent_items import (
    WIDTH,
    LatentRows,
    Queries,
    list_prompts_kernel,
    list_queries_kernel,
)
from framework_attention.triton.latent_products import LatentParts, absorb_kernel, expand_kernel
from framework_attention.triton.latent_prompt import (
    Carried,
    Expanded,
    gather_kernel,
    latent_prompt_kernel,
)
from framework_attention.triton.latent_shapes import LatentShape, absorb_shape, expand_shape, latent_shape, prompt_shape
from framework_attention.triton.latent_write import New, store_kernel

_SHORT = 64
"""Queries of a row from which on its keys are expanded. By operations alone it would be 170 for the heads of DeepSeek
V2 (512 * 256 to expand a key of a head, and 1,088 - 320 less for each query that meets it), but absorbed ones are done
in narrower products."""
_EXPANDED_VALUES = 1 << 26
"""Of keys and values that are expanded at a time: 128 MiB in a short dtype."""
_PLAIN = Turning(None, None, None, 0.0)
_MAX_ABSORBED = 2048
"""Queries that are absorbed at a time: what they take in between is some kilobytes a head of each."""
_WHOLE = 1 << 30
"""Keys of a part that is never cut."""
_MOST_DEPENDENT = 64
"""Queries of a step whose launches may begin before the one ahead has ended: it saves little where they are long, and
costs the host a microsecond each."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A latent layer with its KV memory [num_blocks, block_size, R + d_rope]."""

    spec: LayerSpec
    kv: Tensor

    @property
    def rank(self) -> int:
        return _sizes(self.spec)[0]

    @property
    def rope(self) -> int:
        return _sizes(self.spec)[1]


@dataclass(frozen=True, slots=True)
class Step:
    """A layer's queries and latents, and what happens to them before they count. positions [T], None: no rotation."""

    new: New
    turning: Turning
    norming: Turning
    positions: Tensor | None


@dataclass(frozen=True, slots=True)
class Prompts:
    """A step's prompts as they are listed on the device: tiles [num_tiles, WIDTH], starts [R], and at most num_places
    keys to expand."""

    tiles: Tensor
    starts: Tensor
    num_tiles: int
    num_places: int


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Some of a step's queries as they are listed on the device, num_queries places and num_parts records."""

    queries: Queries
    parts: Tensor
    num_queries: int
    num_parts: int


class LatentTriton:
    """Latent attention over one KV group on a CUDA device. Takes no options.

    KV memory is [num_blocks, block_size, R + d_rope]: the normalised latent of a token and its rotated key.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        block_sizes=(64, 32, 16, 128), any_block_size=True, graph="decode", latent=True, batch_invariant=True
    )

    def __init__(self, options: Mapping[str, Any], ctx: AttentionContext) -> None:
        """Raises ConfigError where the backend's tensors are not on a CUDA device."""
        device = ctx.backend.device
        is_interpreted = bool(triton.knobs.runtime.interpret)
        if device.type != "cuda" and not is_interpreted:
            raise ConfigError(
                f"attention=mla_triton computes on a CUDA device, and backend={ctx.backend.name} on {device.type}. "
                f"Use attention=mla_torch, or backend=cuda"
            )
        self.ctx, self.device = ctx, device
        self.dot_f32 = is_interpreted or ctx.dtype is torch.float32
        self.is_dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.num_sms, self.shared_bytes = _num_multiprocessors(device), _shared_bytes(device)
        self.layers: dict[int, Layer] = {}

    def kv_spec(self, layer: LayerSpec) -> KVSpec:
        return latent_spec(layer, self.ctx)

    def bind(self, layers: Sequence[LayerSpec], kv: Sequence[Tensor]) -> None:
        """Raises ConfigError when the layers do not share what a step's plan rests on: one number of heads, one latent
        shape; and where the device's programs have too little memory for it."""
        shapes = {(layer.num_heads, layer.head_dim, layer.value_dim) for layer in layers}
        if len(shapes) > 1:
            raise ConfigError(
                f"attention=mla_triton: one KV group holds layers of several (heads, head_dim, value_dim): "
                f"{sorted(shapes, key=str)}. Give each a group of its own, or use attention=mla_torch"
            )
        self.layers = {spec.index: Layer(spec, tensor) for spec, tensor in zip(layers, kv, strict=True)}
        self.num_heads = layers[0].num_heads
        self.shape = self._decode_shape(layers[0])
        self.prompt = prompt_shape(self.ctx.dtype, self.shared_bytes)

    def _decode_shape(self, layer: LayerSpec) -> LatentShape:
        rank, rope = map(_pad, _sizes(layer))
        return latent_shape(self.ctx.dtype, layer.num_heads, rank, rope, self.shared_bytes)

    @property
    def groups(self) -> int:
        """Programs that share a part, each with some of the heads."""
        return -(-self.num_heads // self.shape.members)

    @property
    def programs(self) -> int:
        """How many the keys of a step are cut for."""
        return self.num_sms * self.shape.programs_per_sm

    def workspace_bytes(self, layer: LayerSpec, q: Tensor, out: Tensor) -> int:
        """The larger of a step that is absorbed as a whole, and one of a decode a row beside prompts in pieces."""
        ctx, (num_tokens, num_heads, value), size = self.ctx, out.shape, out.element_size()
        rank, rope = _sizes(layer)
        num_parts = self.num_sms * self._decode_shape(layer).programs_per_sm + min(num_tokens, _MAX_ABSORBED)
        of_query, of_part = layer.head_dim * size, rank * size + 4
        short = num_tokens if ctx.batch_invariant else min(num_tokens, ctx.max_num_seqs * (_SHORT - 1))
        absorbed = num_heads * (short * of_query + num_parts * of_part)
        if ctx.batch_invariant or num_tokens < _SHORT:
            return absorbed
        nope, tile = q.shape[2] - rope, prompt_shape(ctx.dtype, self.shared_bytes).tile
        num_keys = min(_piece(num_heads * (nope + value), tile), ctx.max_num_seqs * (ctx.max_model_len + tile))
        expanded = num_keys * size * (layer.head_dim + num_heads * (nope + value))
        carried = num_tokens * num_heads * (value + 2) * 4
        rows = min(num_tokens, ctx.max_num_seqs)
        return max(absorbed, expanded + carried + num_heads * rows * of_query)

    def max_parts(self, max_lens: Any) -> int:
        """Most parts that queries of at most max_lens [n] keys give, as `list_queries_kernel` cuts them."""
        if self.ctx.batch_invariant:
            return len(max_lens)
        by_keys = int(np.maximum(-(-max_lens // self.shape.min_keys), 1).sum())
        return min(len(max_lens) + -(-self.programs // self.groups), by_keys)

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def release(self, req_idx: int) -> None:
        """Nothing is kept a request."""

    def plan(self, batch: InputBatch, group: int) -> LatentPlan:
        """Launches the kernels that list the step's work; reads host twins alone, and waits for nothing."""
        return LatentTritonPlan(self, batch, group)


class LatentTritonPlan:
    """One step's latent attention over one KV group. `decodes` tells whether every row computes one token."""

    def __init__(self, owner: LatentTriton, batch: InputBatch, group: int) -> None:
        scheduled = batch.num_scheduled_tokens_np
        self._owner, self._batch = owner, batch
        self._table, self._slots = batch.block_table[group], batch.slot_mapping[group]
        self._num_tokens = len(self._slots)
        self.decodes = self._num_tokens == len(scheduled) and bool((scheduled == 1).all())
        self._is_full = self._num_tokens == int(scheduled.sum())
        starts = None if self.decodes else batch.query_start_loc
        self._rows = LatentRows(batch.seq_lens, batch.idx_mapping, starts)
        self._prompts: Prompts | None = None
        if self.decodes:
            self._absorbed = self._list_rows()
        elif owner.ctx.batch_invariant or scheduled.max(initial=0) < _SHORT:
            self._absorbed = self._list_tokens()
        else:
            self._absorbed = self._list_rows()
            self._prompts = self._list_prompts()

    def _list_rows(self) -> list[Absorbed]:
        """The query of each row that has one."""
        batch = self._batch
        max_lens = batch.seq_lens_max_np[batch.num_scheduled_tokens_np == 1]
        return [self._list(0, len(batch.seq_lens), max_lens, each_token=False)] if len(max_lens) else []

    def _list_prompts(self) -> Prompts:
        owner, batch, shape, device = self._owner, self._batch, self._owner.prompt, self._slots.device
        scheduled, num_rows = batch.num_scheduled_tokens_np, len(batch.seq_lens)
        is_prompt = scheduled > 1
        num_tiles = int((-(-scheduled[is_prompt] // shape.queries)).sum())
        num_places = int((-(-batch.seq_lens_max_np[is_prompt] // shape.tile)).sum()) * shape.tile
        tiles = torch.empty(num_tiles, WIDTH, dtype=torch.int32, device=device)
        starts = torch.empty(num_rows, dtype=torch.int32, device=device)
        list_prompts_kernel[(1,)](
            self._rows, num_rows, tiles, num_tiles, starts, QUERIES=shape.queries, ALIGN=shape.tile,
            ROWS=1 << _log_places(owner.ctx.max_num_seqs), BLOCK=256,
        )  # fmt: skip
        return Prompts(tiles, starts, num_tiles, num_places)

    def _list_tokens(self) -> list[Absorbed]:
        """Every token as a query of its own, some at a time."""
        longest = int(self._batch.seq_lens_max_np.max(initial=0))
        counts = [min(_MAX_ABSORBED, self._num_tokens - first) for first in range(0, self._num_tokens, _MAX_ABSORBED)]
        return [
            self._list(i * _MAX_ABSORBED, count, np.full(count, longest), each_token=True)
            for i, count in enumerate(counts)
        ]

    def _list(self, first: int, count: int, max_lens: Any, *, each_token: bool) -> Absorbed:
        owner, batch, shape = self._owner, self._batch, self._owner.shape
        is_whole = owner.ctx.batch_invariant
        num_parts, num_rows = owner.max_parts(max_lens), len(batch.seq_lens)
        lists = torch.empty(4, count, dtype=torch.int32, device=self._slots.device)
        parts = torch.empty(num_parts, WIDTH, dtype=torch.int32, device=self._slots.device)
        queries = Queries(*lists.unbind())
        list_queries_kernel[(1,)](
            self._rows, num_rows, queries, first, count, parts, num_parts,
            _WHOLE if is_whole else owner.programs, owner.num_sms, GROUPS=owner.groups,
            GOOD_KEYS=_WHOLE if is_whole else shape.good_keys, MIN_KEYS=_WHOLE if is_whole else shape.min_keys,
            TILE=shape.tile, LOG_ROWS=_log_places(owner.ctx.max_num_seqs), PLACES=1 << _log_places(count),
            EACH_TOKEN=each_token, BLOCK=256, num_warps=8 if count > 512 else 4,
        )  # fmt: skip
        return Absorbed(queries, parts, count, num_parts)

    def forward_latent(self, layer: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        return self._forward(self._owner.layers[layer], self._new(q, latent, _PLAIN, _PLAIN, None), up)

    def forward_latent_projections(
        self, layer: int, q: Tensor, latent: Tensor, rotation: Rotation, norm: LatentNorm, up: LatentUp
    ) -> Tensor:
        """As `TakesLatentProjections`. rotation.positions are those of the batch: a decode's is its length less one."""
        turning, norming = Turning(rotation.table, None, None, 0.0), Turning(None, None, norm.weight, norm.eps)
        return self._forward(self._owner.layers[layer], self._new(q, latent, turning, norming, rotation.positions), up)

    def _new(self, q: Tensor, latent: Tensor, turning: Turning, norming: Turning, positions: Tensor | None) -> Step:
        q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
        latent = latent if latent.stride(1) == 1 else latent.contiguous()
        return Step(New(q, latent, q.stride(0), latent.stride(0), self._slots), turning, norming, positions)

    def _forward(self, bound: Layer, step: Step, up: LatentUp) -> Tensor:
        up, q = LatentUp(_rows_dense(up.keys), _rows_dense(up.values)), step.new.q
        out = torch.empty(q.shape[0], q.shape[1], up.values.shape[1], dtype=q.dtype, device=q.device)
        if self._prompts is not None:
            if not self._is_full:
                out.zero_()
            self._store(bound, step)
        absorbed = [self._absorb(bound, step, up.keys, some) for some in self._absorbed]
        for queries, some in zip(absorbed, self._absorbed, strict=True):
            self._expand(bound, up.values, some, self._attend(bound, queries, some), out)
        if self._prompts is not None:
            self._attend_prompts(bound, step, up, self._prompts, out)
        return out

    def _store(self, bound: Layer, step: Step) -> None:
        store_kernel[(triton.cdiv(self._num_tokens, 4),)](
            step.new, step.turning, step.norming, step.positions, self._num_tokens, bound.kv, RANK=bound.rank,
            RANK_PAD=_pad(bound.rank), ROPE=bound.rope, ROPE_PAD=_pad(bound.rope), TOKENS=4,
        )  # fmt: skip

    def _attend_prompts(self, bound: Layer, step: Step, up: LatentUp, prompts: Prompts, out: Tensor) -> None:
        """Piece by piece; what is carried between pieces exists where there are several."""
        tile, (num_heads, value) = self._owner.prompt.tile, out.shape[1:]
        size = min(_piece(num_heads * (up.keys.shape[1] + value), tile), prompts.num_places)
        bases = range(0, prompts.num_places, size)
        shape = [len(step.new.q), num_heads] if len(bases) > 1 else [1, 1]
        sizes, device = (shape, shape, [*shape, value]), out.device
        carried = Carried(*(torch.empty(each, dtype=torch.float32, device=device) for each in sizes))
        for base in bases:
            num_keys = min(size, prompts.num_places - base)
            expanded = self._expanded(bound, up, prompts, base, num_keys)
            self._attend_piece(bound, step, expanded, prompts, carried, out, base, num_keys)

    def _expanded(self, bound: Layer, up: LatentUp, prompts: Prompts, base: int, num_keys: int) -> Expanded:
        owner, width = self._owner, bound.spec.head_dim
        latents = torch.empty(num_keys, width, dtype=bound.kv.dtype, device=bound.kv.device)
        gather_kernel[(num_keys // 16,)](
            self._rows, len(self._batch.seq_lens), prompts.starts, base, bound.kv, self._table, self._table.stride(0),
            latents, WIDTH=width, WIDTH_PAD=_pad(width), BLOCK_SIZE=bound.kv.shape[1], KEYS=16,
            ROWS=1 << _log_places(owner.ctx.max_num_seqs),
        )  # fmt: skip
        kept = latents[:, : bound.rank]
        return Expanded(latents, kept @ up.keys.flatten(0, 1).T, kept @ up.values.flatten(0, 1).T)

    def _attend_piece(
        self, bound: Layer, step: Step, expanded: Expanded, prompts: Prompts, carried: Carried, out: Tensor, base: int,
        num_keys: int,
    ) -> None:  # fmt: skip
        shape, (num_heads, value) = self._owner.prompt, out.shape[1:]
        nope = expanded.k.shape[1] // num_heads
        latent_prompt_kernel[(prompts.num_tiles * num_heads,)](
            step.new.q, step.new.q_stride, step.turning, expanded, prompts.tiles, carried, out, base, num_keys,
            bound.spec.scale,
            HEADS=num_heads, NOPE=nope, NOPE_PAD=_pad(nope), ROPE=bound.rope, ROPE_PAD=_pad(bound.rope),
            RANK=bound.rank, VALUE=value, VALUE_PAD=_pad(value), QUERIES=shape.queries, TILE=shape.tile,
            IS_FIRST=base == 0, IS_LAST=base + num_keys == prompts.num_places, DOT_F32=self._owner.dot_f32,
            num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip

    def _words(self, some: Absorbed) -> dict[str, bool]:
        """Words of a launch: whether it may begin before the one ahead has ended."""
        if self._owner.is_dependent and some.num_queries <= _MOST_DEPENDENT:
            return {"DEPENDENT": True, "launch_pdl": True}
        return {"DEPENDENT": False}

    def _absorb(self, bound: Layer, step: Step, up_keys: Tensor, some: Absorbed) -> Tensor:
        """[J, H, R + d_rope] of the listed queries; their latents are in their slots."""
        owner, (num_heads, nope, rank) = self._owner, up_keys.shape
        shape = absorb_shape(
            owner.ctx.dtype, _pad(nope), some.num_queries, owner.shared_bytes, is_invariant=owner.ctx.batch_invariant
        )
        columns = min(shape.columns, _pad(rank))
        out = torch.empty(
            some.num_queries, num_heads, bound.spec.head_dim, dtype=bound.kv.dtype, device=bound.kv.device
        )
        grid = triton.cdiv(some.num_queries, shape.queries) * num_heads * triton.cdiv(rank, columns)
        absorb_kernel[(grid,)](
            step.new, step.turning, step.norming, some.queries, some.num_queries, up_keys, up_keys.stride(0), out,
            bound.kv,
            HEADS=num_heads, NOPE=nope, NOPE_PAD=_pad(nope), ROPE=bound.rope, ROPE_PAD=_pad(bound.rope), RANK=rank,
            RANK_PAD=_pad(rank), COLUMNS=columns, QUERIES=shape.queries, DOT_F32=owner.dot_f32,
            num_warps=shape.num_warps, **self._words(some),
        )  # fmt: skip
        return out

    def _attend(self, bound: Layer, absorbed: Tensor, some: Absorbed) -> LatentParts:
        owner, shape, num_heads, device = self._owner, self._owner.shape, bound.spec.num_heads, absorbed.device
        made = LatentParts(
            torch.empty(some.num_parts, num_heads, bound.rank, dtype=absorbed.dtype, device=device),
            torch.empty(some.num_parts, num_heads, dtype=torch.float32, device=device),
        )
        latent_decode_kernel[(some.num_parts * owner.groups,)](
            absorbed, bound.kv, self._table, self._table.stride(0), some.queries, some.parts, made, bound.spec.scale,
            HEADS=num_heads, MEMBERS=shape.members, RANK=bound.rank, RANK_PAD=_pad(bound.rank), ROPE=bound.rope,
            ROPE_PAD=_pad(bound.rope), BLOCK_SIZE=bound.kv.shape[1], TILE=shape.tile, DOT_F32=owner.dot_f32,
            num_warps=shape.num_warps, num_stages=shape.num_stages, **self._words(some),
        )  # fmt: skip
        return made

    def _expand(self, bound: Layer, up_values: Tensor, some: Absorbed, made: LatentParts, out: Tensor) -> None:
        owner, (num_heads, value, rank) = self._owner, up_values.shape
        shape = expand_shape(
            owner.ctx.dtype, _pad(rank), some.num_queries, owner.shared_bytes, is_invariant=owner.ctx.batch_invariant
        )
        columns = min(shape.columns, _pad(value))
        grid = triton.cdiv(some.num_queries, shape.queries) * num_heads * triton.cdiv(value, columns)
        expand_kernel[(grid,)](
            made, some.parts, some.queries, some.num_queries, up_values, up_values.stride(0), out,
            HEADS=num_heads, RANK=rank, RANK_PAD=_pad(rank), VALUE=value, COLUMNS=columns, QUERIES=shape.queries,
            MERGE=shape.merge, DOT_F32=owner.dot_f32, num_warps=shape.num_warps, **self._words(some),
        )  # fmt: skip


def _sizes(layer: LayerSpec) -> tuple[int, int]:
    """(R, d_rope) of what is kept of a token."""
    assert layer.value_dim is not None
    return layer.value_dim, layer.head_dim - layer.value_dim


def _piece(values: int, tile: int) -> int:
    """Keys that are expanded at a time, each into so many values: whole tiles."""
    return max(_EXPANDED_VALUES // values // tile * tile, tile)


def _pad(size: int) -> int:
    """Of a product's side: a power of two, 16 at least."""
    return max(16, triton.next_power_of_2(size))


def _log_places(count: int) -> int:
    """Exponent of the places that a launch is compiled for: 32, 128, 512, ..., each another kernel to wait for."""
    log = 5
    while 1 << log < count:
        log += 2
    return log


def _rows_dense(heads: Tensor) -> Tensor:
    """heads [H, n, R] with the rows of a head one behind the other."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
