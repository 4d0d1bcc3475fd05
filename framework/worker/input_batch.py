"""The tensors of one step: fixed device buffers, filled whole by `step_ops.prepare`, seen through views.

The host packs what it decided (rows, spans, logits rows) into one array, copies it once, and keeps host twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework.batch import NULL_ROW, AllowedTokens, BlockDelta, GrammarRows, InputBatch, Rows, SchedulerOutput
from framework.sent import sent
from framework.step_ops import StepBuffers
from framework.worker.turns import Turns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.interfaces import Backend, Bucket, KVGroup
    from framework.step_ops import TableViews


class InputBuffers:
    """Allocates the step's buffers once and makes an `InputBatch` of them for each step."""

    def __init__(
        self, max_rows: int, max_tokens: int, groups: Sequence[KVGroup], backend: Backend, max_in_flight: int
    ) -> None:
        ops, device = backend.step_ops, backend.device
        self._ops, self._max_rows = ops, max_rows
        # rows, new_blocks of each group, a count, num_scheduled, logits_rows: max_rows each; query_start_loc: one more,
        # and another count
        self._head = (2 + len(groups)) * max_rows  # what a padded step of decodes is told
        self._turns = Turns(backend, len(groups), max_rows, max_in_flight)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._receive, self._prepare_padded = getattr(ops, "receive", None), getattr(ops, "prepare_ragged", None)
        self._host = np.zeros(self._head + 3 * max_rows + 2, np.int64)
        # On a host device this is the same memory: the one copy a step costs nothing there.
        packed = torch.from_numpy(self._host).to(device)
        self._told = packed[: self._head].view(2 + len(groups), max_rows)
        self.num_decodes = _low_word(self._told[-1, :1])
        """[1] int32 rows of the padded step of decodes that was told last, without its padding."""
        self.num_sampling = _low_word(packed[-1:])
        """[1] int32 rows that sample of the step with prompts that was prepared last, without its padding."""
        self._one_each = np.arange(max_rows + 1)  # query_start_loc of a step of one token a row
        self._packed, self._is_shared = packed, packed.data_ptr() == self._host.ctypes.data
        self._every_row = np.arange(max_rows, dtype=np.int32)

        def ints(n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        r, head = max_rows, self._head
        lanes = ints((3 + len(groups)) * max(max_tokens, r)).view(3 + len(groups), -1)
        self.buffers = StepBuffers(
            rows=packed[:r],
            new_blocks=self._told[1:-1],
            num_scheduled=packed[head : head + r],
            logits_rows=packed[head + r : head + 2 * r],
            query_start_loc=packed[head + 2 * r : -1],
            input_ids=ints(max_tokens, torch.int32),
            positions=lanes[0, :max_tokens],
            seq_lens=lanes[1, :r],
            logits_indices=ints(r),
            expanded_idx_mapping=ints(r),
            draw_positions=lanes[2, :r],
            seeds=ints(r),
            slot_mapping=tuple(lane[:max_tokens] for lane in lanes[3:]),
            lanes=lanes,
            arange=torch.arange(max(max_tokens, r), device=device),
            block_sizes=tuple(g.block_size for g in groups),
        )
        self._draft_offset = ints(r, torch.int32)
        self._no_drafts = ints(r).view(r, 1)[:, :0]
        self._views = self._view(r, max_tokens, r)

    def prepare(
        self, scheduled: SchedulerOutput, table: TableViews, *, goes_on: bool, bucket: Bucket | None = None
    ) -> InputBatch:
        """The step's batch. T = scheduled tokens, R = rows, L = rows that sample; R must be at least 1.

        goes_on: as in `SchedulerOutput`, and the last step was prepared here. bucket: what the device is prepared for.
        """
        rows, num_scheduled = scheduled.rows, scheduled.num_scheduled_tokens
        if goes_on:
            logits_rows = self._every_row[: len(rows)]  # the device has all of it since the last step
            r = n = tokens = len(rows)
        else:
            logits_rows = scheduled.samples.nonzero()[0].astype(np.int32)
            r, n = len(rows), len(logits_rows)
            tokens = self._send(rows, num_scheduled, logits_rows, bucket)
        if bucket is None:
            self._ops.prepare(self.buffers, table, r, tokens, n, goes_on)
        else:
            self._prepare_ragged(table, bucket)
        if self._views.shape != (r, tokens, n):
            self._views = self._view(r, tokens, n)
        return InputBatch(
            **self._views.batch,
            block_table=table.block_table,
            rows_np=rows,
            num_scheduled_tokens_np=num_scheduled,
            logits_rows_np=logits_rows,
            seq_lens_max_np=scheduled.num_computed_tokens + num_scheduled,
            goes_on=goes_on,
            grammar_rows=scheduled.grammar_rows,
        )

    def prepare_nothing(self, table: TableViews, bucket: Bucket) -> None:
        """A step of the bucket that is padding as a whole."""
        nothing = self._every_row[:0]
        self._send(nothing, nothing, nothing, bucket)
        self._prepare_ragged(table, bucket)

    def _prepare_ragged(self, table: TableViews, bucket: Bucket) -> None:
        assert self._prepare_padded is not None, "a backend with buckets of prompts has no prepare_ragged"
        self._prepare_padded(self.buffers, table, bucket.requests, bucket.tokens, bucket.logits_rows)

    def ragged_batch(self, bucket: Bucket, table: TableViews, max_seq_len: int) -> InputBatch:
        """The batch of every step of the bucket: fixed memory, and host twins that are bounds."""
        r, n = bucket.requests, bucket.logits_rows
        return InputBatch(
            **self._view(r, bucket.tokens, n).batch,
            block_table=table.block_table,
            rows_np=np.full(r, NULL_ROW, np.int32),
            num_scheduled_tokens_np=np.zeros(r, np.int32),
            logits_rows_np=self._every_row[:n],
            seq_lens_max_np=np.full(r, max_seq_len, np.int32),
            ragged=True,
        )

    def send_decodes(self, rows: NDArray[np.int32], new_blocks: Sequence[NDArray[np.int32]]) -> None:
        """Tells the device a padded step of decodes: rows [R], the block that each of them enters [groups][R], and
        padding behind them. Memory that steps in flight may still read is not written."""
        turn = self._turns.next()
        turn.tell_rows(rows)
        turn.tell_blocks([blocks[: len(rows)] for blocks in new_blocks])
        if self._receive is None:
            self._told.copy_(turn.tensor, non_blocking=True)
        else:
            self._turn.fill_(turn.number)  # a step that was given up may not have counted its turn

    def go_on(self, rows: NDArray[np.int32], deltas: Sequence[BlockDelta]) -> bool:
        """As `send_decodes` for a step that goes on from the one which was told last: it costs no call of the device.
        False, and nothing is told, where the device does not read by itself or a delta does not say where it goes."""
        if self._receive is None:
            return False
        for delta in deltas:
            if delta.at is None and len(delta.ids):
                return False
        turn = self._turns.next()
        turn.tell_rows(rows)
        turn.tell_entered(deltas)
        return True

    def receive(self, num_padded: int) -> None:
        """The first part of a padded step of so many rows: what it was told is in the buffers afterwards."""
        if self._receive is not None:
            self._receive(self._told, self._turns.ring, self._turn, num_padded)

    def padded_batch(self, num_rows: int, table: TableViews, max_seq_len: int) -> InputBatch:
        """The batch of every padded step of num_rows decodes: fixed memory, and host twins that hold for any of them.
        `step_ops.prepare_decodes` fills it."""
        views, ones = self._view(num_rows, num_rows, num_rows), np.ones(num_rows, np.int32)
        return InputBatch(
            **{**views.batch, "query_start_loc": self.buffers.arange[: num_rows + 1]},
            block_table=table.block_table,
            rows_np=np.full(num_rows, NULL_ROW, np.int32),
            num_scheduled_tokens_np=ones,
            logits_rows_np=self._every_row[:num_rows],
            seq_lens_max_np=ones * max_seq_len,
        )

    def padded_rows(self, req_idx: NDArray[np.int32], num_padded: int, masks: GrammarRows | None = None) -> Rows:
        """The first rows of a padded step of num_padded rows, as the sampler sees them."""
        logits = {name: tensor[: len(req_idx)] for name, tensor in self._view(*(num_padded,) * 3).logits.items()}
        return Rows(**logits, req_idx_np=req_idx, allowed=self._allowed(masks, len(req_idx)))

    def logits_view(self, batch: InputBatch) -> Rows:
        """The step that was prepared last, as the sampler sees it: one entry a logits row."""
        rows, at = batch.rows_np, batch.logits_rows_np
        rows_np = rows if len(at) == len(rows) else rows[at]
        return Rows(**self._views.logits, req_idx_np=rows_np, allowed=self._allowed(batch.grammar_rows, len(at)))

    def _allowed(self, masks: GrammarRows | None, num_logits: int) -> AllowedTokens | None:
        """Masks of the step's rows with a grammar, on the device."""
        device = self._packed.device
        if masks is None:
            return None
        bits = sent(masks.bits, device)
        if len(masks.logits_rows) == num_logits:
            return AllowedTokens(None, bits)
        return AllowedTokens(sent(masks.logits_rows.astype(np.int64), device), bits)

    def _send(
        self,
        rows: NDArray[np.int32],
        num_scheduled: NDArray[np.int32],
        logits_rows: NDArray[np.int32],
        bucket: Bucket | None,
    ) -> int:
        """Packs what the host decided, padded to a bucket, and copies it to the device. Gives the number of tokens."""
        m, r, host = self._max_rows, len(rows), self._host
        host[:r] = rows
        head = self._head
        host[head : head + r] = num_scheduled
        host[head + m : head + m + len(logits_rows)] = logits_rows
        host[-1] = len(logits_rows)
        tokens = sum(num_scheduled.tolist())
        starts = host[head + 2 * m : head + 2 * m + r + 1]
        if tokens == r and bucket is None:
            starts[:] = self._one_each[: r + 1]
        else:
            host[head : head + r].cumsum(out=starts[1:])  # behind the 0 that stands there for good
        if bucket is not None:
            self._pad(bucket, r, len(logits_rows), tokens)
        if not self._is_shared:
            self._packed.copy_(torch.from_numpy(host), non_blocking=True)
        return tokens

    def _pad(self, bucket: Bucket, r: int, n: int, tokens: int) -> None:
        """Says of rows behind r that they are nobody's and have no tokens; logits rows behind n are the last row's."""
        host, head, m = self._host, self._head, self._max_rows
        host[r : bucket.requests] = NULL_ROW
        host[head + r : head + bucket.requests] = 0
        host[head + m + n : head + m + bucket.logits_rows] = bucket.requests - 1
        host[head + 2 * m + r + 1 : head + 2 * m + bucket.requests + 1] = tokens

    def _view(self, r: int, tokens: int, n: int) -> _Views:
        b = self.buffers
        batch = {
            "input_ids": b.input_ids[:tokens],
            "positions": b.positions[:tokens],
            "query_start_loc": b.query_start_loc[: r + 1],
            "seq_lens": b.seq_lens[:r],
            "idx_mapping": b.rows[:r],
            "logits_indices": b.logits_indices[:n],
            "expanded_idx_mapping": b.expanded_idx_mapping[:n],
            "draft_offset": self._draft_offset[:n],
            "slot_mapping": tuple(s[:tokens] for s in b.slot_mapping),
        }
        logits = {
            "req_idx": batch["expanded_idx_mapping"],
            "offset": batch["draft_offset"],
            "position": b.draw_positions[:n],
            "seed": b.seeds[:n],
            "drafts": self._no_drafts[:n],
            "num_drafts": self._draft_offset[:n],
        }
        return _Views((r, tokens, n), batch, logits)


def num_ragged_tokens(batch: InputBatch) -> torch.Tensor:
    """[1] int32 tokens of a `ragged` batch, without its padding."""
    return _low_word(batch.query_start_loc[-1:])


def _low_word(count: torch.Tensor) -> torch.Tensor:
    """[1] int64, not negative -> its memory as [1] int32: no launch converts it. The low word lies first on every
    machine that torch has devices for."""
    return count.view(torch.int32)[:1]


@dataclass(frozen=True, slots=True)
class _Views:
    """Views of the buffers for steps of one shape (R, T, L). Decode steps repeat it, and slicing a tensor costs more
    than filling it. batch, logits: tensors of `InputBatch` and of `Rows` by name.
    """

    shape: tuple[int, int, int]
    batch: dict[str, Any]
    logits: dict[str, Any]
