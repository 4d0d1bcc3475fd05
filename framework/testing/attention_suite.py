"""The contract suite of attention plugins: the shared table of shapes against a float64 reference, on any backend.

A plugin for latent layers is held against a table of its own by the same checks. `framework.testing.attention` has the
shapes and the reference, `attention_engine` a layer with its memory. Called by `run=check` and by tests.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from framework.batch import NULL_BLOCK
from framework.interfaces import TakesLatentProjections, TakesProjections
from framework.testing.attention import (
    AttentionCase,
    BuiltCase,
    batch_of,
    build,
    reference,
)
from framework.testing.attention_engine import AttentionEngine, Recorded, compute_past, turnings
from framework.testing.attention_plugin import AttentionPlugin
from framework.testing.checking import Skipped, assert_all
from framework.testing.tolerance import TOLERANCE, off_by

__all__ = ["CHECKS", "AttentionPlugin", "check_attention"]

MIXED = ("decodes_and_chunks_mixed", "decode_whose_block_is_new", "whole_prompt", "decodes_of_many_lengths")


def _run(plugin: AttentionPlugin, built: BuiltCase, block_size: int, *, is_invariant: bool = False) -> Tensor:
    """The step of the case, after a step that computed what it finds there, in memory full of NaN."""
    engine = AttentionEngine(plugin, built, block_size, is_invariant=is_invariant)
    compute_past(engine, built, block_size)
    return engine.step(built.batch, built.q, built.k, built.v)


def _assert_close(plugin: AttentionPlugin, built: BuiltCase, out: Tensor, what: str) -> None:
    expected, tolerance = reference(built, built.case.scale), TOLERANCE[built.q.dtype]
    assert out.dtype == built.q.dtype and out.shape == expected.shape, (
        f"{plugin.name}: gives {out.dtype} {list(out.shape)} for queries {built.q.dtype} {list(built.q.shape)}"
        f" where {list(expected.shape)} is wanted"
    )
    worst = off_by(out.double(), expected, tolerance)
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
    engine = AttentionEngine(plugin, built, size, num_blocks=built.num_blocks + 2)  # two blocks that no table names
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
    engine = AttentionEngine(plugin, first, size)
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
    engine = AttentionEngine(plugin, made[0], size, num_blocks=max(built.num_blocks for built in made))
    with torch.inference_mode():
        recorded = Recorded(engine, max(made, key=lambda built: max(built.case.seq_lens)), size)
        for built in made:
            compute_past(engine, built, size)
            _assert_close(plugin, built, recorded.step(built), "a step that was recorded for others")


RECORDED = ((40, 3, 17), (9, 300, 31), (0, 5, 15))


def check_chunks_of_any_size_give_the_whole_prompt(plugin: AttentionPlugin) -> None:
    """A prompt computed in pieces, single tokens included, reads its own earlier pieces out of the cache."""
    size = plugin.caps.block_sizes[0]
    for case in _with_and_without_all(plugin, AttentionCase("whole_prompt", (0,), (PROMPT,))):
        whole = build(case, size, plugin.dtype)
        for step in CHUNKS:
            engine = AttentionEngine(plugin, whole, size)
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
            engine = AttentionEngine(plugin, built, size, num_blocks=built.num_blocks + 1)
            compute_past(engine, built, size)
            other = NULL_BLOCK if name == "the null block" else built.num_blocks
            checked += _free(engine, built, size, other)
            engine.blocks[other] = value if plugin.dtype is not torch.float16 else min(value, 1e2)
            out = engine.step(built.batch, built.q, built.k, built.v)
            _assert_close(plugin, built, out, f"with {name} behind its window")
    assert checked, f"{plugin.name}: no case of the table has a block behind its window"


def _free(engine: AttentionEngine, built: BuiltCase, block_size: int, other: int) -> int:
    """Blocks wholly behind the window of the step's first query are spoilt, and `other` stands in their place."""
    case, table, count = built.case, built.batch.block_table[0], 0
    for row, computed in zip(built.batch.rows_np.tolist(), case.computed, strict=True):
        behind = max(0, computed - (case.window or 0) + 1) // block_size
        engine.blocks[table[row, :behind].long()] = float("nan")
        table[row, :behind] = other
        count += behind
    return count


def check_projections_give_what_turned_heads_give(plugin: AttentionPlugin) -> None:
    """What a plan with `forward_projections`, or `forward_latent_projections`, does by itself."""
    protocol = TakesLatentProjections if plugin.caps.latent else TakesProjections
    size = plugin.caps.block_sizes[0]
    for case in (case for case in plugin.shapes() if case.name in MIXED):
        built = build(case, size, plugin.dtype)
        for turning in turnings(built):
            engine = AttentionEngine(plugin, built, size)
            compute_past(engine, built, size)
            plan = engine.planned(built.batch)
            if not isinstance(plan, protocol):
                raise Skipped("its plans leave norms and rotation to the model")
            is_turned = [part is not None for part in turning]
            what = f"heads as they are projected, (rotation, norms) = {tuple(is_turned)}"
            _assert_close(plugin, turning.turned(built), engine.project(plan, built, turning), what)


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
    check_projections_give_what_turned_heads_give,
    check_requests_alone_give_the_same_bits,
)


def check_attention(plugin: AttentionPlugin) -> None:
    """Runs every check on the plugin."""
    assert_all(CHECKS, plugin)
