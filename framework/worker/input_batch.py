"""The tensors of one step: fixed device buffers, filled whole by `step_ops.prepare`, seen through views.

The host packs what it decided (rows, spans, logits rows) into one array, copies it once, and keeps host twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from framework.batch import InputBatch, Rows, SchedulerOutput
from framework.step_ops import StepBuffers

if TYPE_CHECKING:
    from framework.interfaces import KVGroup, StepOps
    from framework.step_ops import TableViews


class InputBuffers:
    """Allocates the step's buffers once and makes an `InputBatch` of them for each step."""

    def __init__(
        self, max_rows: int, max_tokens: int, groups: Sequence[KVGroup], device: torch.device, ops: StepOps
    ) -> None:
        self._ops, self._max_rows = ops, max_rows
        # rows, num_scheduled, logits_rows: max_rows each; query_start_loc: one more
        self._host = np.zeros(4 * max_rows + 1, np.int64)
        # On a host device this is the same memory: the one copy a step costs nothing there.
        packed = torch.from_numpy(self._host).to(device)
        self._packed = packed

        def ints(n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        r = max_rows
        self.buffers = StepBuffers(
            rows=packed[:r],
            num_scheduled=packed[r : 2 * r],
            logits_rows=packed[2 * r : 3 * r],
            query_start_loc=packed[3 * r :],
            input_ids=ints(max_tokens, torch.int32),
            positions=ints(max_tokens),
            seq_lens=ints(r),
            logits_indices=ints(r),
            expanded_idx_mapping=ints(r),
            draw_positions=ints(r),
            seeds=ints(r),
            slot_mapping=tuple(ints(max_tokens) for _ in groups),
            arange=torch.arange(max(max_tokens, r), device=device),
            block_sizes=tuple(g.block_size for g in groups),
        )
        self._draft_offset = ints(r, torch.int32)
        self._no_drafts = ints(r).view(r, 1)[:, :0]

    def prepare(self, scheduled: SchedulerOutput, table: TableViews) -> InputBatch:
        """The step's batch. T = scheduled tokens, R = rows, L = rows that sample; R must be at least 1."""
        r, tokens = scheduled.num_rows, scheduled.num_tokens
        logits_rows = np.flatnonzero(scheduled.samples).astype(np.int32)
        n = len(logits_rows)
        m, host = self._max_rows, self._host
        host[:r] = scheduled.rows
        host[m : m + r] = scheduled.num_scheduled_tokens
        host[2 * m : 2 * m + n] = logits_rows
        host[3 * m] = 0
        np.cumsum(scheduled.num_scheduled_tokens, out=host[3 * m + 1 : 3 * m + 1 + r])
        if self._packed.device.type != "cpu":
            self._packed.copy_(torch.from_numpy(host), non_blocking=True)
        self._ops.prepare(self.buffers, table, r, tokens, n)
        b = self.buffers
        return InputBatch(
            input_ids=b.input_ids[:tokens],
            positions=b.positions[:tokens],
            query_start_loc=b.query_start_loc[: r + 1],
            seq_lens=b.seq_lens[:r],
            idx_mapping=b.rows[:r],
            logits_indices=b.logits_indices[:n],
            expanded_idx_mapping=b.expanded_idx_mapping[:n],
            draft_offset=self._draft_offset[:n],
            slot_mapping=tuple(s[:tokens] for s in b.slot_mapping),
            block_table=table.block_table,
            rows_np=scheduled.rows,
            num_scheduled_tokens_np=scheduled.num_scheduled_tokens,
            logits_rows_np=logits_rows,
            seq_lens_max_np=scheduled.num_computed_tokens + scheduled.num_scheduled_tokens,
        )

    def logits_view(self, batch: InputBatch) -> Rows:
        """The same step as the sampler sees it: one entry a logits row."""
        n = len(batch.logits_rows_np)
        return Rows(
            req_idx=batch.expanded_idx_mapping,
            offset=batch.draft_offset,
            position=self.buffers.draw_positions[:n],
            seed=self.buffers.seeds[:n],
            drafts=self._no_drafts[:n],
            num_drafts=self._draft_offset[:n],
            req_idx_np=batch.rows_np[batch.logits_rows_np],
        )
