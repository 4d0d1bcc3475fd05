"""Memory of an engine for one step: a request table of random content and the step's buffers, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from framework.batch import Field
from framework.step_ops import StepBuffers, TableViews
from framework.worker.request_table import TableColumn

ROWS, MAX_LEN, MAX_TOKENS = 9, 40, 200
OUTPUTS = ("logits_indices", "expanded_idx_mapping", "seeds")
Memory = tuple[StepBuffers, TableViews]


def column(values: np.ndarray, dtype: torch.dtype) -> TableColumn:
    """A column as the table holds it: every third entry of a wider row."""
    packed = torch.zeros(len(values), 3, dtype=dtype)
    made = TableColumn(Field("x", "int64"))
    made.dev = packed[:, 1]
    made.dev.copy_(torch.from_numpy(values))
    return made


def memory(step: Sequence[tuple[int, int, bool]], sizes: Sequence[int], seed: int) -> Memory:
    """Tables of random content and the buffers of one step, with leftovers of another step in them.

    step  (scheduled, computed, samples) a row; sizes: tokens of a block, for each KV group
    """
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
    buffers = StepBuffers(
        rows=ints(rows),
        new_blocks=torch.zeros(len(sizes), ROWS, dtype=torch.int64),
        num_scheduled=ints(scheduled),
        query_start_loc=ints([0, *np.cumsum(scheduled)], ROWS + 1),
        logits_rows=ints(np.flatnonzero(samples)),
        input_ids=ints(nothing, MAX_TOKENS, torch.int32),
        arange=torch.arange(MAX_TOKENS),
        block_sizes=tuple(sizes),
        **_lanes(torch.full((3 + len(sizes), MAX_TOKENS), -7)),
        **{name: ints(nothing) for name in OUTPUTS},
    )
    return buffers, table


def padded(step_memory: Memory, num_padding: int, new_blocks: Sequence[tuple[int, int, int]] = ()) -> Memory:
    """The same with rows of nobody behind those of a step of decodes, whose own row is empty as a table leaves it.

    new_blocks  (KV group, batch row, block) of rows that enter one with the step
    """
    buffers, table = step_memory
    used = int((buffers.rows > 0).sum())
    buffers.rows[used : used + num_padding] = 0
    for group, row, block in new_blocks:
        buffers.new_blocks[group, row] = block
    for own in (table.token_ids, table.num_tokens.dev, table.num_computed_tokens.dev, *table.block_table):
        own[0] = 0
    return buffers, table


def on(device: torch.device, step_memory: Memory) -> Memory:
    """A copy on a device; columns stay strided."""
    buffers, table = step_memory

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if isinstance(value, TableColumn):
            column = TableColumn(value.field)
            column.dev = value.dev._base.to(device, copy=True)[:, 1]
            return column
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

    buffers = replace(buffers, **{f.name: moved(getattr(buffers, f.name)) for f in fields(buffers)})
    table = replace(table, **{f.name: moved(getattr(table, f.name)) for f in fields(table)})
    return replace(buffers, **_lanes(buffers.lanes)), table


def _lanes(lanes: torch.Tensor) -> dict[str, Any]:
    return {
        "lanes": lanes,
        "positions": lanes[0],
        "seq_lens": lanes[1, :ROWS],
        "draw_positions": lanes[2, :ROWS],
        "slot_mapping": tuple(lanes[3:]),
    }


def assert_equal(a: Any, b: Any) -> None:
    """Every tensor of two buffers or tables, values and dtypes."""
    for one in fields(a):
        ours, theirs = ([v] if not isinstance(v, tuple) else v for v in (getattr(x, one.name) for x in (a, b)))
        for x, y in zip(ours, theirs, strict=True):
            x, y = (v.dev if isinstance(v, TableColumn) else v for v in (x, y))
            if isinstance(x, torch.Tensor):
                assert x.dtype == y.dtype and torch.equal(x.cpu(), y.cpu()), one.name


@pytest.fixture(scope="session")
def steps() -> SimpleNamespace:
    """The functions above."""
    return SimpleNamespace(memory=memory, padded=padded, on=on, assert_equal=assert_equal)
