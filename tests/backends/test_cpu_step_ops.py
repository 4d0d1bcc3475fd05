"""The CPU's step functions against the torch reference, for random steps over equal memory."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import step_ops
from framework.batch import Field
from framework.step_ops import StepBuffers, TableViews
from framework.worker.request_table import TableColumn
from framework_backends.cpu_step_ops import CpuStepOps

ROWS, MAX_LEN, MAX_TOKENS = 9, 40, 200
OUTPUTS = ("logits_indices", "expanded_idx_mapping", "seeds")

chunks = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.booleans()), min_size=1, max_size=ROWS - 1)
decodes = st.lists(st.tuples(st.just(1), st.integers(0, MAX_LEN - 1), st.booleans()), min_size=1, max_size=ROWS - 1)
# (scheduled, computed, samples) a row
steps = st.one_of(chunks, decodes)
block_sizes = st.lists(st.sampled_from((1, 4, 6, 16)), min_size=1, max_size=3)


def column(values: np.ndarray, dtype: torch.dtype) -> TableColumn:
    """A column as the table holds it: every third entry of a wider row."""
    packed = torch.zeros(len(values), 3, dtype=dtype)
    made = TableColumn(Field("x", "int64"))
    made.dev = packed[:, 1]
    made.dev.copy_(torch.from_numpy(values))
    return made


def memory(step: list[tuple[int, int, bool]], sizes: list[int], seed: int) -> tuple[StepBuffers, TableViews]:
    """Tables of random content and the buffers of one step, with leftovers of another step in them."""
    rng = np.random.default_rng(seed)
    scheduled, computed, samples = (np.array(c) for c in zip(*step, strict=True))
    rows = rng.permutation(np.arange(1, ROWS))[: len(step)]
    all_computed = rng.integers(0, MAX_LEN, ROWS)
    all_computed[rows] = computed
    table = TableViews(
        token_ids=torch.from_numpy(rng.integers(0, 2**31, (ROWS, MAX_LEN), np.int32)),
        num_tokens=column(rng.integers(0, MAX_LEN, ROWS), torch.int32),
        num_computed_tokens=column(all_computed, torch.int32),
        seed=column(rng.integers(-(2**63), 2**63, ROWS), torch.int64),
        block_table=tuple(torch.from_numpy(rng.integers(0, 999, (ROWS, -(-MAX_LEN // n)), np.int32)) for n in sizes),
    )

    def ints(values: Any, length: int = ROWS, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        full = torch.full((length,), -7, dtype=dtype)
        full[: len(values)] = torch.from_numpy(np.asarray(values))
        return full

    nothing = np.zeros(0, np.int64)
    lanes = torch.full((3 + len(sizes), MAX_TOKENS), -7)
    buffers = StepBuffers(
        rows=ints(rows),
        new_blocks=torch.zeros(len(sizes), ROWS, dtype=torch.int64),
        num_scheduled=ints(scheduled),
        query_start_loc=ints([0, *np.cumsum(scheduled)], ROWS + 1),
        logits_rows=ints(np.flatnonzero(samples)),
        input_ids=ints(nothing, MAX_TOKENS, torch.int32),
        positions=lanes[0],
        seq_lens=lanes[1, :ROWS],
        draw_positions=lanes[2, :ROWS],
        slot_mapping=tuple(lanes[3:]),
        lanes=lanes,
        arange=torch.arange(MAX_TOKENS),
        block_sizes=tuple(sizes),
        **{name: ints(nothing) for name in OUTPUTS},
    )
    return buffers, table


def assert_equal(a: Any, b: Any) -> None:
    """Every tensor of two buffers or tables, values and dtypes."""
    for field in fields(a):
        ours, theirs = ([v] if not isinstance(v, tuple) else v for v in (getattr(x, field.name) for x in (a, b)))
        for x, y in zip(ours, theirs, strict=True):
            x, y = (v.dev if isinstance(v, TableColumn) else v for v in (x, y))
            if isinstance(x, torch.Tensor):
                assert x.dtype == y.dtype and torch.equal(x, y), field.name


@settings(max_examples=100, deadline=None)
@given(step=steps, sizes=block_sizes, seed=st.integers(0, 2**32))
def test_a_step_writes_what_the_reference_writes(
    step: list[tuple[int, int, bool]], sizes: list[int], seed: int
) -> None:
    num_rows, num_tokens, num_logits = len(step), sum(s for s, _, _ in step), sum(s for _, _, s in step)
    sampled = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**31, num_logits))
    ours, reference = memory(step, sizes, seed), memory(step, sizes, seed)
    cpu = CpuStepOps()
    cpu.prepare(*ours, num_rows, num_tokens, num_logits, goes_on=False)
    step_ops.prepare(*reference, num_rows, num_tokens, num_logits)
    assert_equal(ours[0], reference[0])
    cpu.post_update(*ours, num_rows, num_logits, sampled)
    step_ops.post_update(*reference, num_rows, num_logits, sampled)
    assert_equal(ours[1], reference[1])


@settings(max_examples=60, deadline=None)
@given(
    computed=st.lists(st.integers(0, MAX_LEN - 8), min_size=1, max_size=ROWS - 1),
    sizes=block_sizes,
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 14),
    data=st.data(),
)
def test_decodes_that_go_on_write_what_the_reference_writes(
    computed: list[int], sizes: list[int], seed: int, num_steps: int, data: st.DataObject
) -> None:
    step, rng = [(1, n, True) for n in computed], np.random.default_rng(seed)
    ours, reference = memory(step, sizes, seed), memory(step, sizes, seed)
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
        assert_equal(ours[0], reference[0])
        sampled = torch.from_numpy(rng.integers(0, 2**31, r))
        cpu.post_update(*ours, r, r, sampled)
        step_ops.post_update(*reference, r, r, sampled)
        assert_equal(ours[1], reference[1])


def test_a_token_drawn_at_the_end_of_a_row_stays_inside_it() -> None:
    step = [(1, MAX_LEN - 1, True)]
    buffers, table = memory(step, [4], 0)
    row = int(buffers.rows[0])
    others = [r for r in range(ROWS) if r != row]
    before = table.token_ids.clone()
    cpu = CpuStepOps()
    cpu.prepare(buffers, table, 1, 1, 1, goes_on=False)
    cpu.post_update(buffers, table, 1, 1, torch.tensor([5]))
    assert torch.equal(table.token_ids[others], before[others])
    assert table.num_computed_tokens.dev[row] == MAX_LEN and table.num_tokens.dev[row] == MAX_LEN + 1


def test_one_object_serves_the_memory_it_is_given() -> None:
    cpu = CpuStepOps()
    step = [(3, 2, True), (1, 7, False)]
    for seed in (1, 2, 1):
        ours, reference = memory(step, [4], seed), memory(step, [4], seed)
        cpu.prepare(*ours, 2, 4, 1, goes_on=False)
        step_ops.prepare(*reference, 2, 4, 1)
        assert_equal(ours[0], reference[0])


def test_decodes_of_two_engines_go_on_in_turn() -> None:
    cpu, step = CpuStepOps(), [(1, 6, True), (1, 7, True)]
    engines = [(memory(step, [4], seed), memory(step, [4], seed)) for seed in (1, 2)]
    for number in range(6):
        for ours, reference in engines:
            cpu.prepare(*ours, 2, 2, 2, goes_on=number > 0)
            step_ops.prepare(*reference, 2, 2, 2)
            assert_equal(ours[0], reference[0])
            for ops, held in ((cpu, ours), (step_ops, reference)):
                ops.post_update(*held, 2, 2, torch.tensor([number, 5]))
            assert_equal(ours[1], reference[1])


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
