"""One step on the device: update rows, prepare the batch, plan attention, forward, sample, commit.

Knows no feature: a stage, a drafter or an attention plugin keeps its own state under the same `req_idx`. It decides
nothing either; the scheduler's output says what runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from framework.batch import InputBatch, NewRequest, SchedulerOutput, StepOutput
from framework.errors import NotBuiltError
from framework.interfaces import ForwardContext
from framework.worker.input_batch import InputBuffers

if TYPE_CHECKING:
    from framework.interfaces import AttentionBackend, Backend, KVGroup, KVSpec, Model, StepFuture
    from framework.sampling.pipeline import SamplerPipeline
    from framework.worker.request_table import RequestTable

_UNBUILT = (
    "encoder_inputs",
    "encoder_freed",
    "grammar_rows",
    "pooling_rows",
    "lora_slots",
    "connector_meta",
    "kv_replay",
)


class ModelRunner:
    """Executes `SchedulerOutput`s with one model on one backend."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        attention: Mapping[str, AttentionBackend],
        groups: Sequence[KVGroup],
        kv: Sequence[torch.Tensor],
        kv_specs: Sequence[KVSpec],
        table: RequestTable,
        pipeline: SamplerPipeline,
        max_num_batched_tokens: int,
    ) -> None:
        self.model, self.backend, self.table, self.pipeline = model, backend, table, pipeline
        self.kv, self.kv_specs = kv, kv_specs
        self._attention = [(g.name, attention[g.name]) for g in groups]
        self._inputs = InputBuffers(table.num_rows, max_num_batched_tokens, groups, backend.device, backend.step_ops)
        self._executable = backend.compile(self._step, None)

    def execute(self, scheduled: SchedulerOutput) -> StepFuture:
        """Starts one step. The host waits only in the future's `result()`."""
        for name in _UNBUILT:
            if getattr(scheduled, name) is not None:
                raise NotBuiltError(f"SchedulerOutput.{name}: the part that serves it is not built yet")
        return self.backend.submit(self._executable, scheduled)

    @torch.inference_mode()
    def _step(self, scheduled: SchedulerOutput) -> StepOutput:
        times = [perf_counter()]
        self._update_rows(scheduled)
        if not scheduled.num_rows:
            return StepOutput(sampled=np.zeros((0, 1), np.int32), num_valid=np.zeros(0, np.int32))
        times.append(perf_counter())
        batch = self._inputs.prepare(scheduled, self.table.views)
        times.append(perf_counter())
        ctx = ForwardContext({name: a.plan(batch, i) for i, (name, a) in enumerate(self._attention)})
        times.append(perf_counter())
        hidden = self.model.forward(self.model.embed(batch.input_ids), batch.positions, ctx).hidden
        if not len(batch.logits_rows_np):
            self._post_update(batch, hidden.new_zeros(0, dtype=torch.int64))
            times += [perf_counter()] * 3
            return _output(scheduled, times)
        logits = self.model.compute_logits(hidden.index_select(0, batch.logits_indices))
        times.append(perf_counter())
        rows = self._inputs.logits_view(batch)
        result = self.pipeline.sample(logits, rows)
        num_valid = torch.ones_like(rows.num_drafts)
        self.pipeline.commit(rows, result.ids.unsqueeze(1), num_valid)
        times.append(perf_counter())
        self._post_update(batch, result.ids)
        output = _output(scheduled, times)
        ids, output.logprobs, errors = self.pipeline.collect(result)
        output.payloads = self.pipeline.collect_payloads(result)
        batch_rows = batch.logits_rows_np
        output.sampled[batch_rows, 0] = ids
        output.num_valid[batch_rows] = 1
        output.errors = {int(batch_rows[i]): text for i, text in errors.items()}
        times.append(perf_counter())
        _time(output, times)
        return output

    def _update_rows(self, scheduled: SchedulerOutput) -> None:
        """Rows that left are released before rows that arrive: an arriving request may take a row of this very step."""
        for row in (*scheduled.finished, *scheduled.preempted, *scheduled.aborted):
            for _, attention in self._attention:
                attention.release(row)
        for new in scheduled.new:
            self._add(new)
        self.table.apply(scheduled.new_block_ids)
        if scheduled.block_ops:
            self._move_blocks(scheduled)

    def _add(self, new: NewRequest) -> None:
        self.table.add(new)
        self.pipeline.add_request(new.req_idx, new.params, new)
        for _, attention in self._attention:
            attention.add_request(new.req_idx)

    def _move_blocks(self, scheduled: SchedulerOutput) -> None:
        ops = scheduled.block_ops
        if ops.swap_in or ops.swap_out:
            raise NotBuiltError("scheduler.preemption=swap is not built yet")
        if ops.copy:
            self.backend.copy_blocks(self.kv, self.kv_specs, ops.copy)
        if ops.zero:
            zeros = [torch.zeros_like(t) for t in self.backend.gather_blocks(self.kv, self.kv_specs, ops.zero)]
            self.backend.scatter_blocks(self.kv, self.kv_specs, ops.zero, zeros)

    def _post_update(self, batch: InputBatch, sampled: torch.Tensor) -> None:
        rows, logits_rows = len(batch.rows_np), len(batch.logits_rows_np)
        self.backend.step_ops.post_update(self._inputs.buffers, self.table.views, rows, logits_rows, sampled)


_PARTS = ("rows", "prepare", "plan", "forward", "sample", "post")


def _output(scheduled: SchedulerOutput, times: list[float]) -> StepOutput:
    r = scheduled.num_rows
    output = StepOutput(sampled=np.full((r, 1), -1, np.int32), num_valid=np.zeros(r, np.int32))
    _time(output, times)
    return output


def _time(output: StepOutput, times: list[float]) -> None:
    """Host seconds of the step's parts, from the moments between them."""
    output.timings = {part: b - a for part, a, b in zip(_PARTS, times, times[1:], strict=False)}
