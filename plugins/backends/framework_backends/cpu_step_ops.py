"""The step's array functions in numpy, over the memory of the tensors that the engine holds.

On a host a tensor and its numpy view are one memory, and a small numpy operation costs a fifth of a torch one. What the
functions mean is written in `framework.step_ops`, whose results these equal. The runner and the request table call in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from framework import step_ops

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.step_ops import StepBuffers, TableViews


class CpuStepOps:
    """`interfaces.StepOps` of the host. Keeps the views of the buffers and table that it saw last."""

    def __init__(self) -> None:
        self._memory: StepMemory | None = None

    def apply_rows(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        table.numpy()[rows.numpy()] = values.numpy()

    def apply_spans(self, flat: Tensor, starts: Sequence[int], counts: Sequence[int], values: Tensor) -> None:
        target, source, offset = flat.numpy(), values.numpy(), 0
        for start, count in zip(starts, counts, strict=True):
            target[start : start + count] = source[offset : offset + count]
            offset += count

    def prepare(
        self,
        buffers: StepBuffers,
        table: TableViews,
        num_rows: int,
        num_tokens: int,
        num_logits: int,
        goes_on: bool,
    ) -> None:
        memory = self._of(buffers, table)
        if goes_on and memory.knows_last_step:
            memory.go_on(num_rows)
        else:
            memory.prepare(num_rows, num_tokens, num_logits)

    def receive(self, told: Tensor, ring: Tensor, turn: Tensor, num_rows: int) -> None:
        step_ops.receive(told, ring, turn, num_rows)

    def prepare_decodes(self, buffers: StepBuffers, table: TableViews, num_rows: int) -> None:
        """By the reference: eager steps on a host are not padded, so that speed is nothing here."""
        self._memory = None
        step_ops.prepare_decodes(buffers, table, num_rows)

    def prepare_ragged(
        self, buffers: StepBuffers, table: TableViews, num_rows: int, num_tokens: int, num_logits: int
    ) -> None:
        """As `prepare_decodes`."""
        self._memory = None
        step_ops.prepare_ragged(buffers, table, num_rows, num_tokens, num_logits)

    def post_update(
        self, buffers: StepBuffers, table: TableViews, num_rows: int, num_logits: int, sampled: Tensor
    ) -> None:
        if self._memory is None:  # the step was prepared by the reference
            step_ops.post_update(buffers, table, num_rows, num_logits, sampled)
        else:
            self._of(buffers, table).commit(num_rows, num_logits, sampled.numpy())

    def _of(self, buffers: StepBuffers, table: TableViews) -> StepMemory:
        """The memory of an engine, made anew where another one of this backend has stepped between."""
        memory = self._memory
        if memory is None or memory.buffers is not buffers or memory.table is not table:
            memory = self._memory = StepMemory(buffers, table)
        return memory


class StepMemory:
    """Numpy views of one engine's step buffers and request table.

    A step finds the caches full of weights, so that a kind of operation costs ten times its usual time when it first
    appears. Hence few kinds: tables are read and written through flat indices, both sides of a copy have one dtype, and
    `prepare` works out what `commit` writes. One step at a time, then: the backend's max_in_flight is 1.
    """

    def __init__(self, buffers: StepBuffers, table: TableViews) -> None:
        self.buffers, self.table = buffers, table
        b, t = buffers, table
        self._rows, self._scheduled, self._starts = b.rows.numpy(), b.num_scheduled.numpy(), b.query_start_loc.numpy()
        self._logits_rows, self._arange = b.logits_rows.numpy(), b.arange.numpy()
        self._input_ids, self._positions, self._seq_lens = b.input_ids.numpy(), b.positions.numpy(), b.seq_lens.numpy()
        self._logits_indices, self._logits_req = b.logits_indices.numpy(), b.expanded_idx_mapping.numpy()
        self._draw_positions, self._seeds = b.draw_positions.numpy(), b.seeds.numpy()
        self._token_ids, self._max_len = t.token_ids.view(-1).numpy(), t.token_ids.shape[1]
        self._num_tokens, self._num_computed = t.num_tokens.dev.numpy(), t.num_computed_tokens.dev.numpy()
        self._seed = t.seed.dev.numpy()
        self._groups = [
            (blocks.view(-1).numpy(), blocks.shape[1], slots.numpy(), size)
            for blocks, slots, size in zip(t.block_table, b.slot_mapping, b.block_sizes, strict=True)
        ]
        self._lanes, num_lanes = b.lanes.numpy(), len(self._groups) + 1
        # Of a decode, which goes on: where its drawn token goes, and a group the offset of its own in its block.
        self._decoding = np.zeros((num_lanes, len(self._rows)), np.int64)
        self._lengths = np.zeros((2, len(self._rows)), np.int32)
        self._drawn: NDArray[np.int32] | None = None

    @property
    def knows_last_step(self) -> bool:
        """Whether a step was committed here, for the next one to go on from."""
        return self._drawn is not None

    def go_on(self, num_rows: int) -> None:
        """The next token of the rows that decoded last: everything is one further, and now and then in a new block."""
        self._lanes[:, :num_rows] += 1
        self._decoding[:, :num_rows] += 1
        self._lengths[:, :num_rows] += 1
        self._input_ids[:num_rows] = self._drawn
        for group, (blocks, width, slots, size) in enumerate(self._groups):
            offsets = self._decoding[1 + group, :num_rows]
            if size in offsets.tolist():  # of so few numbers a list is searched sooner than an array
                new = (offsets == size).nonzero()[0]
                offsets[new] = 0
                block = blocks[self._rows[new] * width + self._positions[new] // size]
                slots[new] = block.astype(np.int64) * size

    def prepare(self, num_rows: int, num_tokens: int, num_logits: int) -> None:
        """The step's token ids, positions, lengths, slots and logits rows."""
        rows, scheduled = self._rows[:num_rows], self._scheduled[:num_rows]
        computed = self._num_computed[rows].astype(np.int64)
        seq_lens = np.add(computed, scheduled, out=self._seq_lens[:num_rows])
        self._ends = self._lengths[0, :num_rows]
        self._ends[:] = seq_lens
        positions = self._positions[:num_tokens]
        if num_tokens == num_rows:  # one token a row: no row has to be found for a token
            token_rows = rows
            positions[:] = computed
        else:
            token_rows = rows.repeat(scheduled)
            shift = (computed - self._starts[:num_rows]).repeat(scheduled)
            np.add(shift, self._arange[:num_tokens], out=positions)
        self._input_ids[:num_tokens] = self._token_ids[token_rows * self._max_len + positions]
        for blocks, width, slots, size in self._groups:
            column = positions // size
            block = blocks[token_rows * width + column].astype(np.int64)
            np.add((block - column) * size, positions, out=slots[:num_tokens])
        if num_tokens == num_rows == num_logits:
            self._draw_of_every_row(num_rows)
            for offsets, (*_, size) in zip(self._decoding[1:], self._groups, strict=True):
                offsets[:num_rows] = positions % size
        else:
            self._find_logits(num_logits)

    def _draw_of_every_row(self, num_rows: int) -> None:
        """The same as `_find_logits` where row, token and logits row are one: a step of decodes."""
        self._logits_req[:num_rows] = rows = self._rows[:num_rows]
        self._logits_indices[:num_rows] = self._arange[:num_rows]
        self._draw_positions[:num_rows] = position = self._seq_lens[:num_rows]
        self._seeds[:num_rows] = self._seed[rows]
        self._mark_places(rows, position)

    def _find_logits(self, num_logits: int) -> None:
        """Which hidden states give logits, whose they are, and which token of its sequence each of them draws."""
        batch_rows = self._logits_rows[:num_logits]
        req_idx = self._logits_req[:num_logits] = self._rows[batch_rows]
        self._logits_indices[:num_logits] = self._starts[batch_rows + 1] - 1
        self._draw_positions[:num_logits] = position = self._seq_lens[batch_rows]
        self._seeds[:num_logits] = self._seed[req_idx]
        self._mark_places(req_idx, position)

    def _mark_places(self, req_idx: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        """Where the drawn tokens go. Nothing reads one drawn at max_len, see the reference: it stays inside its row."""
        n = len(position)
        self._places, self._num_known = self._decoding[0, :n], self._lengths[1, :n]
        np.add(req_idx * self._max_len, np.minimum(position, self._max_len - 1), out=self._places)
        self._num_known[:] = position + 1

    def commit(self, num_rows: int, num_logits: int, sampled: NDArray[np.int64]) -> None:
        """Advances lengths and appends the drawn tokens [L], one a logits row, of the step that was prepared last."""
        assert (num_rows, num_logits) == (len(self._ends), len(self._places)), "another step was prepared since"
        self._num_computed[self._rows[:num_rows]] = self._ends
        if num_logits:
            self._drawn = self._token_ids[self._places] = sampled.astype(np.int32)
            self._num_tokens[self._logits_req[:num_logits]] = self._num_known
