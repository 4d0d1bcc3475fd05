"""What padded steps are told: in turns, by the device's own reading or by a copy, and always the step's own line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from framework.batch import NO_BLOCKS, BlockDelta
from framework.interfaces import BackendContext, KVGroup
from framework.worker.input_batch import InputBuffers
from framework_backends.cpu import CpuBackend
from framework_backends.cpu_step_ops import CpuStepOps

WIDTH, NUM_GROUPS, IN_FLIGHT = 6, 2, 2


@pytest.fixture
def inputs() -> InputBuffers:
    groups = [KVGroup(f"g{i}", block_size=4, layers=(i,)) for i in range(NUM_GROUPS)]
    return InputBuffers(WIDTH, 32, groups, CpuBackend({}, BackendContext()), IN_FLIGHT)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def delta(at: Sequence[int] | None, ids: Sequence[int]) -> BlockDelta:
    n = np.ones(len(ids), np.int32)
    return BlockDelta(n, n, n, ints(*ids), None if at is None else ints(*at))


def told(inputs: InputBuffers) -> list[list[int]]:
    """Rows and the blocks of each group, as the step that runs next finds them."""
    inputs.receive(WIDTH)
    return [inputs.buffers.rows.tolist(), *inputs.buffers.new_blocks.tolist()]


def test_rows_and_blocks_are_told_with_padding_behind_them(inputs: InputBuffers) -> None:
    inputs.send_decodes(ints(3, 5, 1), [ints(7, 0, 9), ints(0, 8, 0)])
    assert told(inputs) == [[3, 5, 1, 0, 0, 0], [7, 0, 9, 0, 0, 0], [0, 8, 0, 0, 0, 0]]
    inputs.send_decodes(ints(2), [ints(0), ints(4)])
    for _ in range(IN_FLIGHT + 1):  # a line that has been another step's keeps nothing of it
        inputs.send_decodes(ints(2), [ints(0), ints(4)])
        assert told(inputs) == [[2, 0, 0, 0, 0, 0], [0] * 6, [4, 0, 0, 0, 0, 0]]


def test_device_knows_how_many_rows_are_no_padding(inputs: InputBuffers) -> None:
    assert inputs.num_decodes.dtype == torch.int32 and inputs.num_decodes.shape == (1,)
    for count in (3, 1, 0, 4, 2):
        rows = np.arange(1, count + 1, dtype=np.int32)
        inputs.send_decodes(rows, [rows, rows])
        told(inputs)
        assert inputs.num_decodes.tolist() == [count]
        assert inputs.go_on(rows, (NO_BLOCKS, NO_BLOCKS))
        told(inputs)
        assert inputs.num_decodes.tolist() == [count]


def test_steps_that_go_on_are_told_the_blocks_that_they_enter(inputs: InputBuffers) -> None:
    rows = ints(3, 5, 1)
    inputs.send_decodes(rows, [ints(7, 0, 9), ints(0, 0, 0)])
    told(inputs)
    for step in range(1, 6):
        assert inputs.go_on(rows, (delta([2, 0], [step, 40]), NO_BLOCKS))
        assert told(inputs) == [[3, 5, 1, 0, 0, 0], [40, 0, step, 0, 0, 0], [0] * 6]


def test_steps_in_flight_read_their_own_lines(inputs: InputBuffers) -> None:
    rows = ints(3, 5)
    inputs.send_decodes(rows, [ints(7, 0), ints(0, 0)])
    assert inputs.go_on(rows, (delta([1], [8]), NO_BLOCKS))
    assert inputs.go_on(rows, (delta([0], [9]), NO_BLOCKS))
    assert [told(inputs)[1][:2] for _ in range(3)] == [[7, 0], [0, 8], [9, 0]]


def test_step_that_was_given_up_leaves_no_line_behind(inputs: InputBuffers) -> None:
    inputs.send_decodes(ints(3), [ints(7), ints(0)])
    inputs.go_on(ints(3), (delta([0], [8]), NO_BLOCKS))
    inputs.send_decodes(ints(4), [ints(9), ints(0)])
    assert told(inputs)[:2] == [[4, 0, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0]]


def test_step_goes_on_only_where_its_blocks_say_where_they_go(inputs: InputBuffers) -> None:
    rows = ints(3)
    inputs.send_decodes(rows, [ints(7), ints(0)])
    assert not inputs.go_on(rows, (delta(None, [8]), NO_BLOCKS))
    assert told(inputs)[1][0] == 7, "nothing was told"


def test_device_that_does_not_read_by_itself_is_sent_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CpuStepOps, "receive")
    inputs = InputBuffers(WIDTH, 32, [KVGroup("g", block_size=4, layers=(0,))], CpuBackend({}, BackendContext()), 1)
    inputs.send_decodes(ints(3, 5), [ints(7, 0)])
    assert told(inputs) == [[3, 5, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0]]
    assert inputs.num_decodes.tolist() == [2]
    assert not inputs.go_on(ints(3, 5), (NO_BLOCKS,))
