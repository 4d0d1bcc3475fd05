"""The CPU's step functions against the torch reference, for random steps over equal memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import step_ops
from framework_backends.cpu_step_ops import CpuStepOps

ROWS, MAX_LEN = 9, 40  # of the memory that conftest makes

chunks = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.booleans()), min_size=1, max_size=ROWS - 1)
decodes = st.lists(st.tuples(st.just(1), st.integers(0, MAX_LEN - 1), st.booleans()), min_size=1, max_size=ROWS - 1)
# (scheduled, computed, samples) a row
random_steps = st.one_of(chunks, decodes)
block_sizes = st.lists(st.sampled_from((1, 4, 6, 16)), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(step=random_steps, sizes=block_sizes, seed=st.integers(0, 2**32))
def test_a_step_writes_what_the_reference_writes(
    steps: SimpleNamespace, step: list[tuple[int, int, bool]], sizes: list[int], seed: int
) -> None:
    num_rows, num_tokens, num_logits = len(step), sum(s for s, _, _ in step), sum(s for _, _, s in step)
    sampled = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**31, num_logits))
    ours, reference = steps.memory(step, sizes, seed), steps.memory(step, sizes, seed)
    cpu = CpuStepOps()
    cpu.prepare(*ours, num_rows, num_tokens, num_logits, goes_on=False)
    step_ops.prepare(*reference, num_rows, num_tokens, num_logits)
    steps.assert_equal(ours[0], reference[0])
    cpu.post_update(*ours, num_rows, num_logits, sampled)
    step_ops.post_update(*reference, num_rows, num_logits, sampled)
    steps.assert_equal(ours[1], reference[1])


@settings(max_examples=60, deadline=None)
@given(
    computed=st.lists(st.integers(0, MAX_LEN - 8), min_size=1, max_size=ROWS - 1),
    sizes=block_sizes,
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 14),
    data=st.data(),
)
def test_decodes_that_go_on_write_what_the_reference_writes(
    steps: SimpleNamespace,
    computed: list[int],
    sizes: list[int],
    seed: int,
    num_steps: int,
    data: st.DataObject,
) -> None:
    step, rng = [(1, n, True) for n in computed], np.random.default_rng(seed)
    ours, reference = steps.memory(step, sizes, seed), steps.memory(step, sizes, seed)
    cpu, r = CpuStepOps(), len(step)
    for index in range(num_steps):
        event = data.draw(st.sampled_from(("none", "none", "none", "row", "fewer")))
        goes_on = index > 0 and event == "none"
        if event == "row":  # another request in one of the rows: its length and tokens are others
            row, length = int(ours[0].rows[0]), int(rng.integers(0, MAX_LEN - 15))
            for _, table in (ours, reference):
                table.num_computed_tokens.dev[row] = length
                table.token_ids[row] = torch.arange(MAX_LEN, dtype=torch.int32) + length
        if event == "fewer" and r > 1:
            r -= 1
            for buffers, _ in (ours, reference):
                buffers.logits_rows[:r] = torch.arange(r)
        if int(max(int(ours[1].num_computed_tokens.dev[i]) for i in ours[0].rows[:r])) >= MAX_LEN - 1:
            break
        cpu.prepare(*ours, r, r, r, goes_on)
        step_ops.prepare(*reference, r, r, r, goes_on)
        steps.assert_equal(ours[0], reference[0])
        sampled = torch.from_numpy(rng.integers(0, 2**31, r))
        cpu.post_update(*ours, r, r, sampled)
        step_ops.post_update(*reference, r, r, sampled)
        steps.assert_equal(ours[1], reference[1])


def test_a_token_drawn_at_the_end_of_a_row_stays_inside_it(steps: SimpleNamespace) -> None:
    step = [(1, MAX_LEN - 1, True)]
    buffers, table = steps.memory(step, [4], 0)
    row = int(buffers.rows[0])
    others = [r for r in range(ROWS) if r != row]
    before = table.token_ids.clone()
    cpu = CpuStepOps()
    cpu.prepare(buffers, table, 1, 1, 1, goes_on=False)
    cpu.post_update(buffers, table, 1, 1, torch.tensor([5]))
    assert torch.equal(table.token_ids[others], before[others])
    assert table.num_computed_tokens.dev[row] == MAX_LEN and table.num_tokens.dev[row] == MAX_LEN + 1


def test_one_object_serves_the_memory_it_is_given(steps: SimpleNamespace) -> None:
    cpu = CpuStepOps()
    step = [(3, 2, True), (1, 7, False)]
    for seed in (1, 2, 1):
        ours, reference = steps.memory(step, [4], seed), steps.memory(step, [4], seed)
        cpu.prepare(*ours, 2, 4, 1, goes_on=False)
        step_ops.prepare(*reference, 2, 4, 1)
        steps.assert_equal(ours[0], reference[0])


def test_decodes_of_two_engines_go_on_in_turn(steps: SimpleNamespace) -> None:
    cpu, step = CpuStepOps(), [(1, 6, True), (1, 7, True)]
    engines = [(steps.memory(step, [4], seed), steps.memory(step, [4], seed)) for seed in (1, 2)]
    for number in range(6):
        for ours, reference in engines:
            cpu.prepare(*ours, 2, 2, 2, goes_on=number > 0)
            step_ops.prepare(*reference, 2, 2, 2)
            steps.assert_equal(ours[0], reference[0])
            for ops, held in ((cpu, ours), (step_ops, reference)):
                ops.post_update(*held, 2, 2, torch.tensor([number, 5]))
            steps.assert_equal(ours[1], reference[1])


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=6), data=st.data())
def test_spans_are_written_where_the_reference_writes_them(lengths: list[int], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, 40)) for _ in lengths]
    values = torch.arange(1, sum(lengths) + 1, dtype=torch.int32)
    ours, reference = (torch.zeros(50, dtype=torch.int32) for _ in range(2))
    CpuStepOps().apply_spans(ours, starts, lengths, values)
    step_ops.apply_spans(reference, starts, lengths, values)
    assert torch.equal(ours, reference)


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.integers(0, 7), unique=True))
def test_rows_are_written_where_the_reference_writes_them(rows: list[int]) -> None:
    values = torch.randint(0, 256, (len(rows), 24), dtype=torch.uint8)
    ours, reference = (torch.zeros(8, 24, dtype=torch.uint8) for _ in range(2))
    index = torch.tensor(rows, dtype=torch.int64)
    CpuStepOps().apply_rows(ours, index, values)
    step_ops.apply_rows(reference, index, values)
    assert torch.equal(ours, reference)
