"""Padded steps of decodes by the torch reference and by the CPU's step functions, which go by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import step_ops
from framework.batch import NULL_BLOCK, NULL_ROW
from framework_backends.cpu_step_ops import CpuStepOps

MAX_LEN = 40  # of the memory that conftest makes
ALL_OPS = pytest.mark.parametrize("ops", (step_ops, CpuStepOps()), ids=("reference", "cpu"))
STEP = [(1, 7, True), (1, 0, True), (1, 15, True)]


@ALL_OPS
@settings(max_examples=40, deadline=None)
@given(
    computed=st.lists(st.integers(0, MAX_LEN - 1), min_size=1, max_size=8),
    sizes=st.lists(st.sampled_from((1, 4, 6, 16)), min_size=1, max_size=3),
    data=st.data(),
)
def test_decodes_without_padding_are_a_step_after_its_blocks_are_appended(
    steps: SimpleNamespace, ops: Any, computed: list[int], sizes: list[int], data: st.DataObject
) -> None:
    step, r = [(1, n, True) for n in computed], len(computed)
    ours, wanted = steps.memory(step, sizes, 1), steps.memory(step, sizes, 1)
    for group, size in enumerate(sizes):
        entered = data.draw(st.lists(st.sampled_from((NULL_BLOCK, 1000 + group)), min_size=r, max_size=r))
        for buffers, _ in (ours, wanted):
            buffers.new_blocks[group, :r] = torch.tensor(entered)
        blocks = wanted[1].block_table[group]
        new = [i for i in range(r) if entered[i] != NULL_BLOCK]
        starts = [int(wanted[0].rows[i]) * blocks.shape[1] + computed[i] // size for i in new]
        values = torch.tensor([entered[i] for i in new], dtype=torch.int32)
        step_ops.apply_spans(blocks.view(-1), starts, [1] * len(new), values)
    step_ops.prepare(*wanted, r, r, r)
    ops.prepare_decodes(*ours, r)
    for mine, theirs in zip(ours, wanted, strict=True):
        steps.assert_equal(mine, theirs)


@ALL_OPS
def test_padding_rows_are_as_the_input_batch_says(steps: SimpleNamespace, ops: Any) -> None:
    buffers, table = steps.padded(steps.memory(STEP, [4, 2], 1), 5)
    block_tables = [blocks.clone() for blocks in table.block_table]
    ops.prepare_decodes(buffers, table, 8)
    padding = slice(3, 8)
    for of_rows in (buffers.seq_lens, buffers.positions, buffers.draw_positions, buffers.input_ids):
        assert not of_rows[padding].any()
    assert (buffers.expanded_idx_mapping[padding] == NULL_ROW).all()
    assert buffers.logits_indices[padding].tolist() == [3, 4, 5, 6, 7]
    assert buffers.slot_mapping[0][padding].tolist() == [3, 0, 1, 2, 3]
    assert buffers.slot_mapping[1][padding].tolist() == [1, 0, 1, 0, 1]
    assert all(map(torch.equal, block_tables, table.block_table))


@ALL_OPS
def test_padding_changes_no_other_row(steps: SimpleNamespace, ops: Any) -> None:
    entered = [(0, 1, 77), (1, 2, 78)]
    short, long = (steps.padded(steps.memory(STEP, [4, 2], 1), count, entered) for count in (0, 5))
    ops.prepare_decodes(*short, 3)
    ops.prepare_decodes(*long, 8)
    names = ("input_ids", "positions", "seq_lens", "logits_indices", "expanded_idx_mapping", "draw_positions", "seeds")
    for name in names:
        assert torch.equal(getattr(short[0], name)[:3], getattr(long[0], name)[:3]), name
    for ours, theirs in zip(short[0].slot_mapping, long[0].slot_mapping, strict=True):
        assert torch.equal(ours[:3], theirs[:3])
    steps.assert_equal(short[1], long[1])


@ALL_OPS
def test_a_padded_step_commits_as_one_without_padding(steps: SimpleNamespace, ops: Any) -> None:
    short, long = (steps.padded(steps.memory(STEP, [4], 1), count) for count in (0, 5))
    for memory, count in ((short, 3), (long, 8)):
        ops.prepare_decodes(*memory, count)
        ops.post_update(*memory, count, count, torch.arange(count) + 100)
    assert short[1].num_computed_tokens.dev[short[0].rows[:3]].tolist() == [8, 1, 16]
    assert short[1].token_ids[short[0].rows[0], 8] == 100
    long[1].token_ids[NULL_ROW, 0] = 0  # which nobody reads
    steps.assert_equal(short[1], long[1])


def test_a_step_on_the_cpu_after_a_padded_one_starts_anew(steps: SimpleNamespace) -> None:
    cpu, ours, wanted = CpuStepOps(), steps.memory(STEP, [4], 1), steps.memory(STEP, [4], 1)
    for ops, memory in ((cpu, ours), (step_ops, wanted)):
        for _ in range(2):
            ops.prepare_decodes(*memory, 3)
            ops.post_update(*memory, 3, 3, torch.arange(3))
            ops.prepare(*memory, 3, 3, 3, goes_on=True)
            ops.post_update(*memory, 3, 3, torch.arange(3))
    steps.assert_equal(ours[1], wanted[1])
