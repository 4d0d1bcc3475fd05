"""The contract suite of attention plugins: the shared table of shapes against a float64 reference, on any backend.

Knows no layout of KV memory: what a request has computed before a step is written by the plugin itself, in an earlier
step. A plugin for latent layers is held against a table of its own by the same checks. `framework.testing.attention`
has the shapes and the reference. Called by `run=check` and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from framework.batch import NULL_BLOCK, NULL_ROW, InputBatch
from framework.interfaces import AttentionCaps, AttentionContext, Backend, Bucket, LatentUp
from framework.testing.attention import (
    CASES,
    DEEPSEEK,
    LATENT_CASES,
    AttentionCase,
    BuiltCase,
    LatentSizes,
    batch_of,
    build,
    reference,
)
from framework.testing.checking import Skipped, assert_all

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Absolute and relative: sums over up to 1500 keys in float32; the others round results to 8 or 11 bits."""
_ANY_HEAD_DIM = 16
MIXED = ("decodes_and_chunks_mixed", "decode_whose_block_is_new", "whole_prompt", "decodes_of_many_lengths")


@dataclass(frozen=True)
class AttentionPlugin:
    """The plugin is built as target(options, AttentionContext). backend: makes the one it runs on, for a dtype."""

    target: Any
    backend: Any
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    @property
    def caps(self) -> AttentionCaps:
        caps: AttentionCaps = self.target.caps
        return caps

    @property
    def dtype(self) -> torch.dtype:
        """The first that it serves, float32 if it can."""
        return torch.float32 if "float32" in self.caps.dtypes else getattr(torch, self.caps.dtypes[0])

    def shapes(self) -> list[AttentionCase]:
        """Rows of the table that it says it can serve."""
        return [case for case in map(self.fitted, LATENT_CASES if self.caps.latent else CASES) if self.serves(case)]

    def fitted(self, case: AttentionCase) -> AttentionCase:
        """The case with a layer of a kind and size that it serves: heads of 16 stand for any."""
        sizes = self.caps.head_dims
        if self.caps.latent:
            latent = case.latent or LatentSizes()
            is_other = sizes and latent.rank + latent.rope not in sizes
            return replace(case, latent=DEEPSEEK if is_other else latent)
        is_other = sizes and case.head_dim == _ANY_HEAD_DIM and case.head_dim not in sizes
        return replace(case, head_dim=sizes[0]) if is_other else case

    def serves(self, case: AttentionCase) -> bool:
        caps = self.caps
        is_offered = (
            (case.window is None or caps.window)
            and (case.softcap is None or caps.softcap)
            and (not case.has_sinks or caps.sinks)
            and (case.latent is not None) == caps.latent
        )
        return is_offered and (not caps.head_dims or case.kept[1] in caps.head_dims)


class _Engine:
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
        on_device = replace(
            batch,
            **{name: getattr(batch, name).to(self.device) for name in _TENSORS},
            slot_mapping=tuple(t.to(self.device) for t in batch.slot_mapping),
            block_table=tuple(t.to(self.device) for t in batch.block_table),
        )
        return self.attend(self.attention.plan(on_device, 0), *(t.to(self.device) for t in (q, k, v))).cpu()

    def attend(self, plan: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The layer's attention by a plan, all on the device."""
        out: Tensor
        out = plan.forward(0, q, k, v) if self._up is None else plan.forward_latent(0, q, k[:, 0], self._up)
        return out


_TENSORS = (
    "input_ids", "positions", "query_start_loc", "seq_lens", "idx_mapping", "logits_indices", "expanded_idx_mapping",
    "draft_offset",
)  # fmt: skip


def _run(plugin: AttentionPlugin, built: BuiltCase, block_size: int, *, is_invariant: bool = False) -> Tensor:
    """The step of the case, after a step that computed what it finds there, in memory full of NaN."""
    engine = _Engine(plugin, built, block_size, is_invariant=is_invariant)
    _compute_past(engine, built, block_size)
    return engine.step(built.batch, built.q, built.k, built.v)


def _compute_past(engine: _Engine, built: BuiltCase, block_size: int) -> None:
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


class _Recorded:
    """A padded step of decodes that the backend compiles while all of its rows are padding, and runs for others.

    built  the step with the longest request of all; the last token of each step is padding
    """

    def __init__(self, engine: _Engine, built: BuiltCase, block_size: int) -> None:
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


def _assert_close(plugin: AttentionPlugin, built: BuiltCase, out: Tensor, what: str) -> None:
    expected, tolerance = reference(built, built.case.scale), TOLERANCE[built.q.dtype]
    assert out.dtype == built.q.dtype and out.shape == expected.shape, (
        f"{plugin.name}: gives {out.dtype} {list(out.shape)} for queries {built.q.dtype} {list(built.q.shape)}"
        f" where {list(expected.shape)} is wanted"
    )
    difference = (out.double() - expected).abs() - tolerance * expected.abs()
    worst = float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0
    assert worst <= tolerance, (
        f"{plugin.name}: {what}, case {built.case.name}: off by {worst:.3g} in {built.q.dtype}, {tolerance:g} may"
    )


def check_output_equals_the_reference(plugin: AttentionPlugin) -> None:
    """Every shape that it serves, in blocks of its own choice."""
    for case in plugin.shapes():
        built = build(case, plugin.caps.block_sizes[0], plugin.dtype)
        _assert_close(plugin, built, _run(plugin, built, plugin.caps.block_sizes[0]), "differs from the reference")


def check_every_dtype_and_block_size(plugin: AttentionPlugin) -> None:
    """Those that it declares; a few more block sizes where it declares any."""
    sizes = {*plugin.caps.block_sizes, *((8, 32) if plugin.caps.any_block_size else ())}
    for case in (case for case in plugin.shapes() if case.name in MIXED):
        for name in plugin.caps.dtypes:
            for size in sorted(sizes):
                built = build(case, size, getattr(torch, name))
                _assert_close(plugin, built, _run(plugin, built, size), f"blocks of {size}")


def check_padding_gives_zero(plugin: AttentionPlugin) -> None:
    """0 for padding tokens and rows, never NaN, whatever their queries are."""
    shapes = [case for case in plugin.shapes() if case.padding_tokens]
    if not shapes:
        raise Skipped("it serves no shape of the table with padding")
    for case in shapes:
        built = build(case, plugin.caps.block_sizes[0], plugin.dtype)
        built.q[-case.padding_tokens :] = float("nan")
        out = _run(plugin, built, plugin.caps.block_sizes[0])[-case.padding_tokens :]
        assert bool((out == 0).all()), f"{plugin.name}: gives {out.flatten()[:3].tolist()} for padding, 0 is wanted"


def check_blocks_of_others_are_left_alone(plugin: AttentionPlugin) -> None:
    """A step writes into the slots of its own tokens and of the null block, and nowhere else."""
    case = next(case for case in plugin.shapes() if case.name == "decodes_and_chunks_mixed")
    size = plugin.caps.block_sizes[0]
    built = build(case, size, plugin.dtype)
    engine = _Engine(plugin, built, size, num_blocks=built.num_blocks + 2)  # two blocks that no table names
    blocks = engine.blocks
    blocks[:] = 1.5
    named = {int(b) for row in built.batch.rows_np.tolist() for b in built.batch.block_table[0][row]} | {NULL_BLOCK}
    engine.arrive(built.batch.rows_np.tolist())
    engine.step(built.batch, built.q, built.k, built.v)
    for block in range(len(blocks)):
        if block not in named:
            assert bool((blocks[block] == 1.5).all()), f"{plugin.name}: writes into block {block}, which no request has"


def check_row_is_reused(plugin: AttentionPlugin) -> None:
    """After release and add_request a row is another request's: other blocks, another length."""
    case, size = plugin.fitted(AttentionCase("whole_prompt", (0,), (37,))), plugin.caps.block_sizes[0]
    first, second = build(case, size, plugin.dtype, seed=1), build(replace(case, scheduled=(20,)), size, plugin.dtype)
    second.up = first.up  # the layer stays
    engine = _Engine(plugin, first, size)
    for built in (first, second):
        row = int(built.batch.rows_np[0])
        engine.arrive([row])
        _assert_close(plugin, built, engine.step(built.batch, built.q, built.k, built.v), "a row that is used again")
        engine.attention.release(row)


def check_recorded_steps_serve_other_requests(plugin: AttentionPlugin) -> None:
    """What `graph` means: a padded step of decodes is compiled once, and then its tensors alone tell of a step."""
    if plugin.caps.graph == "never":
        raise Skipped("it does not say that its steps can be recorded")
    for case in _with_and_without_all(plugin, AttentionCase("recorded_decodes", (), (1, 1, 1), padding_tokens=1)):
        _check_recorded(plugin, case)


def _with_and_without_all(plugin: AttentionPlugin, case: AttentionCase) -> list[AttentionCase]:
    """The case as it stands, and with everything that the plugin offers at once, where that is anything."""
    case, caps = plugin.fitted(case), plugin.caps
    window, softcap = 24 if caps.window else None, 1.5 if caps.softcap else None
    name = f"{case.name}_with_all_that_it_offers"
    full = replace(case, name=name, window=window, softcap=softcap, has_sinks=caps.sinks)
    return [case] if caps.latent or not (window or softcap or caps.sinks) else [case, full]


def _check_recorded(plugin: AttentionPlugin, case: AttentionCase) -> None:
    size = plugin.caps.block_sizes[0]
    steps = [replace(case, computed=computed) for computed in RECORDED]
    made = [build(step, size, plugin.dtype, seed) for seed, step in enumerate(steps)]
    for built in made:
        built.sinks, built.up = made[0].sinks, made[0].up  # the layer stays
    engine = _Engine(plugin, made[0], size, num_blocks=max(built.num_blocks for built in made))
    with torch.inference_mode():
        recorded = _Recorded(engine, max(made, key=lambda built: max(built.case.seq_lens)), size)
        for built in made:
            _compute_past(engine, built, size)
            _assert_close(plugin, built, recorded.step(built), "a step that was recorded for others")


RECORDED = ((40, 3, 17), (9, 300, 31), (0, 5, 15))


def check_chunks_of_any_size_give_the_whole_prompt(plugin: AttentionPlugin) -> None:
    """A prompt computed in pieces, single tokens included, reads its own earlier pieces out of the cache."""
    size = plugin.caps.block_sizes[0]
    for case in _with_and_without_all(plugin, AttentionCase("whole_prompt", (0,), (PROMPT,))):
        whole = build(case, size, plugin.dtype)
        for step in CHUNKS:
            engine = _Engine(plugin, whole, size)
            engine.spoil()
            engine.arrive(whole.batch.rows_np.tolist())
            parts = [
                engine.step(part.batch, part.q, part.k, part.v)
                for part in (_piece(whole, first, min(first + step, PROMPT), size) for first in range(0, PROMPT, step))
            ]
            _assert_close(plugin, whole, torch.cat(parts), f"a prompt in pieces of {step}")


PROMPT, CHUNKS = 53, (1, 7, 16, 52)


def _piece(built: BuiltCase, first: int, last: int, block_size: int) -> BuiltCase:
    """Tokens first .. last of a case with one request that has computed nothing."""
    case = replace(built.case, computed=(first,), scheduled=(last - first,))
    rows = built.batch.rows_np.tolist()
    batch, span = batch_of(case, block_size, rows, built.batch.block_table[0]), slice(first, last)
    return replace(built, case=case, batch=batch, q=built.q[span], k=built.k[span], v=built.v[span])


def check_blocks_behind_the_window_are_not_read(plugin: AttentionPlugin) -> None:
    """A block that no query of a request reads any more is freed: its place in the block table names a block that is
    another request's by now, NaN included, or the null block."""
    if not plugin.caps.window:
        raise Skipped("it does not offer windows")
    sizes, checked = [*plugin.caps.block_sizes, *((8,) if plugin.caps.any_block_size else ())], 0
    size = min(sizes)  # so that a tile of keys lies in several blocks
    for case in (case for case in plugin.shapes() if case.window is not None):
        case = replace(case, computed=tuple(n and n + 3 * size for n in case.computed))
        for name, value in (("the null block", 1e4), ("a block of another request", float("nan"))):
            built = build(case, size, plugin.dtype)
            engine = _Engine(plugin, built, size, num_blocks=built.num_blocks + 1)
            _compute_past(engine, built, size)
            other = NULL_BLOCK if name == "the null block" else built.num_blocks
            checked += _free(engine, built, size, other)
            engine.blocks[other] = value if plugin.dtype is not torch.float16 else min(value, 1e2)
            out = engine.step(built.batch, built.q, built.k, built.v)
            _assert_close(plugin, built, out, f"with {name} behind its window")
    assert checked, f"{plugin.name}: no case of the table has a block behind its window"


def _free(engine: _Engine, built: BuiltCase, block_size: int, other: int) -> int:
    """Blocks wholly behind the window of the step's first query are spoilt, and `other` stands in their place."""
    case, table, count = built.case, built.batch.block_table[0], 0
    for row, computed in zip(built.batch.rows_np.tolist(), case.computed, strict=True):
        behind = max(0, computed - (case.window or 0) + 1) // block_size
        engine.blocks[table[row, :behind].long()] = float("nan")
        table[row, :behind] = other
        count += behind
    return count


def check_requests_alone_give_the_same_bits(plugin: AttentionPlugin) -> None:
    """What `batch_invariant` means: neighbours change no bit of a request's result."""
    if not plugin.caps.batch_invariant:
        raise Skipped("it does not offer batch_invariant")
    size = plugin.caps.block_sizes[0]
    for case in (case for case in plugin.shapes() if case.name in MIXED):
        built = build(case, size, plugin.dtype)
        together = _run(plugin, built, size, is_invariant=True)
        for place in range(len(case.scheduled)):
            own = _alone(built, place, size)
            start = sum(case.scheduled[:place])
            alone = _run(plugin, own, size, is_invariant=True)
            assert torch.equal(alone, together[start : start + len(alone)]), (
                f"{plugin.name}: request {place} of case {case.name} gives other bits alone than among others"
            )


def _alone(built: BuiltCase, place: int, block_size: int) -> BuiltCase:
    """One request of a case, in the same blocks."""
    case = built.case
    one = replace(case, computed=(case.computed[place],), scheduled=(case.scheduled[place],), padding_tokens=0)
    tokens = slice(sum(case.scheduled[:place]), sum(case.scheduled[: place + 1]))
    row = int(built.batch.rows_np[place])
    return replace(
        built,
        case=one,
        batch=batch_of(one, block_size, [row], built.batch.block_table[0]),
        q=built.q[tokens],
        k=built.k[tokens],
        v=built.v[tokens],
        past=[built.past[place]],
        past_slots=[built.past_slots[place]],
    )


CHECKS = (
    check_output_equals_the_reference,
    check_every_dtype_and_block_size,
    check_padding_gives_zero,
    check_blocks_of_others_are_left_alone,
    check_row_is_reused,
    check_chunks_of_any_size_give_the_whole_prompt,
    check_blocks_behind_the_window_are_not_read,
    check_recorded_steps_serve_other_requests,
    check_requests_alone_give_the_same_bits,
)


def check_attention(plugin: AttentionPlugin) -> None:
    """Runs every check on the plugin."""
    assert_all(CHECKS, plugin)
