"""`prepare` and `post_update` against a plain loop over requests, for random mixtures of chunks and decodes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import SamplingParams, step_ops
from framework.batch import BlockDelta, NewRequest, SchedulerOutput
from framework.interfaces import BackendContext, Bucket, KVGroup
from framework.worker.input_batch import InputBuffers
from framework.worker.request_table import RequestTable
from framework_backends.cpu import CpuBackend

BLOCK, MAX_LEN, ROWS, TOKENS = 4, 32, 7, 64
GROUPS = (KVGroup("full", block_size=BLOCK, layers=(0,)),)

spans = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 8), st.booleans()), min_size=1, max_size=ROWS - 1
)  # (scheduled, computed, samples)


def build(case: list[tuple[int, int, bool]], order: list[int]) -> tuple[RequestTable, InputBuffers, SchedulerOutput]:
    table = RequestTable(ROWS, MAX_LEN, torch.device("cpu"), step_ops)
    table.allocate(GROUPS)
    deltas: list[list[int]] = [[], [], [], []]
    for row, (scheduled, computed, _) in zip(order, case, strict=True):
        ids = np.arange(100 * row, 100 * row + computed + scheduled, dtype=np.int32)
        table.add(NewRequest(row, str(row), ids, len(ids), computed, SamplingParams(), row))
        blocks = [10 * row + i for i in range(-(-len(ids) // BLOCK))]
        for column, values in zip(deltas, ([row], [0], [len(blocks)], blocks), strict=True):
            column.extend(values)
    table.apply()
    table.append_blocks([BlockDelta(*(np.array(c, np.int32) for c in deltas))])
    scheduled, computed, samples = (list(c) for c in zip(*case, strict=True))
    output = SchedulerOutput(
        step_id=0,
        rows=np.array(order, np.int32),
        num_scheduled_tokens=np.array(scheduled, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        samples=np.array(samples, np.bool_),
        num_drafts=np.zeros(len(case), np.int32),
    )
    return table, InputBuffers(ROWS, TOKENS + 64, GROUPS, CpuBackend({}, BackendContext()), 1), output


@settings(max_examples=120, deadline=None)
@given(case=spans, padding=st.none() | st.integers(0, 30), data=st.data())
def test_prepare_and_post_update_equal_a_plain_loop(
    case: list[tuple[int, int, bool]], padding: int | None, data: st.DataObject
) -> None:
    """Also where the step is padded: by so many tokens, to all rows."""
    order = data.draw(st.permutations(range(1, ROWS)))[: len(case)]
    table, inputs, output = build(case, order)
    tokens = sum(scheduled for scheduled, _, _ in case)
    bucket = None if padding is None else Bucket(tokens + padding, ROWS - 1, ROWS - 1, tokens)
    batch = inputs.prepare(output, table.views, goes_on=False, bucket=bucket)
    rows = inputs.logits_view(batch)
    ids, positions, slots, last, draws = [], [], [], [], []
    for row, (scheduled, computed, samples) in zip(order, case, strict=True):
        for p in range(computed, computed + scheduled):
            ids.append(100 * row + p)
            positions.append(p)
            slots.append((10 * row + p // BLOCK) * BLOCK + p % BLOCK)
        if samples:
            last.append(len(ids) - 1)
            draws.append((row, computed + scheduled))
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping[0].tolist() == slots
    assert batch.query_start_loc.tolist() == [0, *np.cumsum([s for s, _, _ in case]).tolist()]
    assert batch.seq_lens.tolist() == [s + c for s, c, _ in case]
    assert batch.logits_indices.tolist() == last
    assert list(zip(rows.req_idx.tolist(), rows.position.tolist(), strict=True)) == draws
    assert rows.seed.tolist() == rows.req_idx.tolist() == rows.req_idx_np.tolist()

    if bucket is not None:
        padded = inputs.ragged_batch(bucket, table.views, MAX_LEN)
        num_padded = ROWS - 1 - len(case)
        assert padded.query_start_loc.tolist() == batch.query_start_loc.tolist() + [tokens] * num_padded
        assert padded.seq_lens.tolist()[len(case) :] == padded.idx_mapping.tolist()[len(case) :] == [0] * num_padded
        assert padded.positions.tolist() == positions + [0] * (bucket.tokens - tokens)
        assert padded.slot_mapping[0].tolist() == slots + [i % BLOCK for i in range(tokens, bucket.tokens)]
        assert padded.logits_indices.tolist()[: len(last)] == last
        assert 0 <= min(padded.logits_indices.tolist()) <= max(padded.logits_indices.tolist()) < tokens

    step_ops.post_update(inputs.buffers, table.views, len(case), len(draws), torch.arange(len(draws)) + 7)
    computed_now = table.views.num_computed_tokens.dev
    assert [int(computed_now[r]) for r in order] == [s + c for s, c, _ in case]
    for i, (row, position) in enumerate(draws):
        assert table.token_ids[row, position] == i + 7
        assert table.views.num_tokens.dev[row] == position + 1


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=ROWS - 1), min_size=2, max_size=5))
def test_steps_of_changing_shape_leave_nothing_behind(lengths: list[list[int]]) -> None:
    """One set of buffers through several steps: each batch equals that of fresh buffers."""
    table, inputs, _ = build([(12, 8, True)] * (ROWS - 1), list(range(1, ROWS)))
    for step, spans in enumerate(lengths):
        r = len(spans)
        samples = np.array([(row + step) % 3 > 0 for row in range(r)])
        computed = np.full(r, 8, np.int32)
        rows = np.arange(1, r + 1, dtype=np.int32)
        scheduled = SchedulerOutput(step, rows, np.array(spans, np.int32), computed, samples, np.zeros(r, np.int32))
        fresh = InputBuffers(ROWS, TOKENS + 64, GROUPS, CpuBackend({}, BackendContext()), 1)
        ours, theirs = (
            inputs.prepare(scheduled, table.views, goes_on=False),
            fresh.prepare(scheduled, table.views, goes_on=False),
        )
        pairs = [(ours, theirs), (inputs.logits_view(ours), fresh.logits_view(theirs))]
        for field, a, b in ((f.name, getattr(x, f.name), getattr(y, f.name)) for x, y in pairs for f in fields(x)):
            parts = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
            assert all(np.array_equal(x, y) for x, y in parts), field
        assert ours.query_start_loc.tolist() == [0, *np.cumsum(spans)]
        assert ours.positions.tolist() == [8 + i for n in spans for i in range(n)]
