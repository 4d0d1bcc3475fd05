"""One layer of an attention plugin with its KV memory, on the bench: steps of built cases, eager and recorded.

Knows no layout of KV memory, and no case: what a request has computed before a step is written by the plugin itself, in
an earlier step. The checks are in `attention_suite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from framework.batch import NULL_BLOCK, NULL_ROW, InputBatch
from framework.interfaces import AttentionContext, Backend, Bucket, HeadNorms, LatentNorm, LatentUp, Rotation
from framework.layers.ops import rms_norm, rotate
from framework.testing.attention import BuiltCase, batch_of
from framework.testing.attention_plugin import AttentionPlugin


class AttentionEngine:
    """An attention plugin with one layer's KV memory: that of a built case, whose further weights it knows."""

    def __init__(
        self, plugin: AttentionPlugin, built: BuiltCase, block_size: int, *, num_blocks: int = 0,
        is_invariant: bool = False,
    ) -> None:  # fmt: skip
        case, dtype = built.case, built.q.dtype
        self.backend: Backend = plugin.backend(dtype)
        self.device = self.backend.device
        longest = max(4096, *case.seq_lens, case.num_tokens)
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": longest, "max_model_len": longest}
        ctx = AttentionContext(self.backend, block_size, dtype, batch_invariant=is_invariant, **limits)
        self.attention = plugin.target(plugin.options, ctx)
        layer = case.layer(None if built.sinks is None else built.sinks.to(self.device))
        up = built.up
        self._up = None if up is None else LatentUp(up.keys.to(self.device), up.values.to(self.device))
        self.spec = self.attention.kv_spec(layer)
        (self.kv,) = self.backend.allocate_kv([self.spec], num_blocks or built.num_blocks)
        self.attention.bind([layer], [self.kv])

    @property
    def blocks(self) -> Tensor:
        """The KV memory with its blocks along dimension 0."""
        return self.kv.movedim(self.spec.shape.index(-1), 0)

    def spoil(self) -> None:
        """NaN in every block but the null one: what a former owner may have left."""
        self.blocks[NULL_BLOCK + 1 :] = float("nan")

    def arrive(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.attention.add_request(row)

    def step(self, batch: InputBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Output of a step, on the host as what it is given."""
        return self.attend(self.planned(batch), *(t.to(self.device) for t in (q, k, v))).cpu()

    def planned(self, batch: InputBatch) -> Any:
        """The plan of a batch that is on the host."""
        on_device = replace(
            batch,
            **{name: getattr(batch, name).to(self.device) for name in _TENSORS},
            slot_mapping=tuple(t.to(self.device) for t in batch.slot_mapping),
            block_table=tuple(t.to(self.device) for t in batch.block_table),
        )
        return self.attention.plan(on_device, 0)

    def attend(self, plan: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The layer's attention by a plan, all on the device."""
        out: Tensor
        out = plan.forward(0, q, k, v) if self._up is None else plan.forward_latent(0, q, k[:, 0], self._up)
        return out

    def project(self, plan: Any, built: BuiltCase, turning: Turning) -> Tensor:
        """As `step`, of a plan that normalises and rotates by itself."""
        q, k, v = (t.to(self.device) for t in (built.q, built.k, built.v))
        on = turning.to(self.device)
        out: Tensor
        if self._up is None:
            out = plan.forward_projections(0, torch.cat((q, k, v), dim=1), on.rotation, on.norms)
        else:
            out = plan.forward_latent_projections(0, q, k[:, 0], on.rotation, on.norms, self._up)
        return out.cpu()


_TENSORS = (
    "input_ids", "positions", "query_start_loc", "seq_lens", "idx_mapping", "logits_indices", "expanded_idx_mapping",
    "draft_offset",
)  # fmt: skip


def compute_past(engine: AttentionEngine, built: BuiltCase, block_size: int) -> None:
    """A step that computes what the case finds there, in memory full of NaN."""
    case, rows = built.case, built.batch.rows_np.tolist()
    engine.spoil()
    engine.arrive([row for row, length in zip(rows, case.seq_lens, strict=True) if length])
    before = [i for i, computed in enumerate(case.computed) if computed]
    if before:
        lengths = tuple(case.computed[i] for i in before)
        past = replace(case, computed=(0,) * len(before), scheduled=lengths, padding_tokens=0)
        k, v = (torch.cat([built.past[i][side] for i in before]) for side in (0, 1))
        q = torch.zeros(past.num_tokens, case.num_heads, case.query_dim, dtype=built.q.dtype)
        engine.step(batch_of(past, block_size, [rows[i] for i in before], built.batch.block_table[0]), q, k, v)


class Recorded:
    """A padded step of decodes that the backend compiles while all of its rows are padding, and runs for others.

    built  the step with the longest request of all; the last token of each step is padding
    """

    def __init__(self, engine: AttentionEngine, built: BuiltCase, block_size: int) -> None:
        num_rows, longest = len(built.q), max(built.case.seq_lens) + 100
        self._engine, device = engine, engine.device
        self._batch = replace(
            built.batch,
            input_ids=built.batch.input_ids.to(device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            query_start_loc=torch.arange(num_rows + 1, device=device),
            seq_lens=torch.zeros(num_rows, dtype=torch.int64, device=device),
            idx_mapping=torch.full((num_rows,), NULL_ROW, device=device),
            slot_mapping=(torch.arange(num_rows, device=device) % block_size,),
            block_table=(torch.full((num_rows, 4 + longest // block_size), NULL_BLOCK, dtype=torch.int32).to(device),),
            rows_np=np.full(num_rows, NULL_ROW, np.int32),
            num_scheduled_tokens_np=np.ones(num_rows, np.int32),
            logits_rows_np=np.arange(num_rows, dtype=np.int32),
            seq_lens_max_np=np.full(num_rows, longest, np.int32),  # holds for any step
        )
        self._inputs = [torch.zeros_like(x, device=device) for x in (built.q, built.k, built.v)]
        bucket = Bucket(num_rows, num_rows, num_rows, query_len=1)
        self._run = engine.backend.compile(self._step, bucket)

    def _step(self) -> Tensor:
        return self._engine.attend(self._engine.attention.plan(self._batch, 0), *self._inputs)

    def step(self, built: BuiltCase) -> Tensor:
        """The case's step: only tensors tell of it."""
        batch, n = built.batch, len(built.batch.seq_lens)
        for mine, theirs in zip(self._inputs, (built.q, built.k, built.v), strict=True):
            mine.copy_(theirs)
        self._batch.positions.copy_(batch.positions)
        self._batch.slot_mapping[0].copy_(batch.slot_mapping[0])
        self._batch.seq_lens[:n] = batch.seq_lens.to(self._engine.device)
        self._batch.idx_mapping[:n] = batch.idx_mapping.to(self._engine.device)
        self._batch.block_table[0].zero_()
        self._batch.block_table[0][:, : batch.block_table[0].shape[1]] = batch.block_table[0].to(self._engine.device)
        out: Tensor = self._run()
        return out.cpu()


class Turning(NamedTuple):
    """What happens to a case's queries and keys before they are attended: norms, then a rotation; None for none.

    Of a latent layer both are there, and are those of the latent and of its rotated part.
    """

    rotation: Rotation | None
    norms: HeadNorms | LatentNorm | None

    def to(self, device: torch.device) -> Turning:
        rotation, norms = self.rotation, self.norms
        if rotation is not None:
            rotation = Rotation(rotation.table.to(device), rotation.positions.to(device))
        if isinstance(norms, HeadNorms):
            norms = HeadNorms(norms.q_weight.to(device), norms.k_weight.to(device), norms.eps)
        elif norms is not None:
            norms = LatentNorm(norms.weight.to(device), norms.eps)
        return Turning(rotation, norms)

    def turned(self, built: BuiltCase) -> BuiltCase:
        """The case with queries and keys as `forward` gets them."""
        q, k = built.q, built.k
        if isinstance(self.norms, HeadNorms):
            q = rms_norm(q, self.norms.q_weight, self.norms.eps)
            k = rms_norm(k, self.norms.k_weight, self.norms.eps)
        elif self.norms is not None:
            rank = len(self.norms.weight)
            k = torch.cat((rms_norm(k[..., :rank], self.norms.weight, self.norms.eps), k[..., rank:]), dim=2)
        if self.rotation is not None:
            q, k = (self._rotated(heads, self.rotation) for heads in (q, k))
        return replace(built, q=q, k=k)

    def _rotated(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """heads [T, H, D], of which the last as many as the table is wide turn."""
        cos, sin = rotation.table[rotation.positions].unsqueeze(2).unbind(1)
        still, turning = heads.split((heads.shape[2] - cos.shape[2], cos.shape[2]), dim=2)
        return torch.cat((still, rotate(turning, cos, sin)), dim=2)


def turnings(built: BuiltCase, seed: int = 0) -> list[Turning]:
    """Those that a layer of the case may ask for."""
    generator, case, dtype = torch.Generator().manual_seed(seed), built.case, built.q.dtype
    width = case.head_dim if case.latent is None else case.latent.rope
    table = torch.rand(max(case.seq_lens) + 1, 2, width, generator=generator) * 2 - 1
    rotation = Rotation(table, built.batch.positions)

    def weight(width: int) -> Tensor:
        return (1 + torch.randn(width, generator=generator) / 4).to(dtype)

    if case.latent is not None:
        return [Turning(rotation, LatentNorm(weight(case.latent.rank), 1e-6))]
    norms = HeadNorms(weight(width), weight(width), 1e-6)
    return [Turning(rotation, norms), Turning(rotation, None), Turning(None, norms), Turning(None, None)]
