"""One step on the device: update rows, prepare the batch, plan attention, forward, sample, commit.

Knows no feature: a stage, a drafter or an attention plugin keeps its own state under the same `req_idx`. It decides
nothing either; the scheduler's output says what runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from framework.batch import InputBatch, NewRequest, SchedulerOutput, StepOutput, Transfers
from framework.errors import NotBuiltError
from framework.interfaces import ForwardContext
from framework.worker.host_blocks import HostBlocks
from framework.worker.input_batch import InputBuffers
from framework.worker.layerwise import LayerwisePlan

if TYPE_CHECKING:
    from framework.interfaces import (
        AttentionBackend,
        AttentionPlan,
        Backend,
        KVConnector,
        KVGroup,
        KVSpec,
        Model,
        StepFuture,
    )
    from framework.sampling.logprobs import Measured
    from framework.sampling.pipeline import SampleResult, SamplerPipeline
    from framework.sampling.prompt_logprobs import Span
    from framework.worker.request_table import RequestTable

    Computed = tuple[SampleResult | None, list[list[Measured]]]

_UNBUILT = (
    "encoder_inputs",
    "encoder_freed",
    "pooling_rows",
    "lora_slots",
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
        num_swap_blocks: int,
        connector: KVConnector,
    ) -> None:
        self.model, self.backend, self.table, self.pipeline = model, backend, table, pipeline
        self.kv, self.kv_specs = kv, kv_specs
        self._connector = connector
        self._connector.bind(backend, kv, kv_specs)
        self._host_blocks = HostBlocks(backend, kv, kv_specs, num_swap_blocks)
        self._attention = [(g.name, attention[g.name]) for g in groups]
        self._inputs = InputBuffers(table.num_rows, max_num_batched_tokens, groups, backend.device, backend.step_ops)
        self._ones = torch.ones(table.num_rows, dtype=torch.int32, device=backend.device)
        self._ones_np = np.ones(table.num_rows, np.int32)  # never written
        self._no_ids = torch.zeros(0, dtype=torch.int64, device=backend.device)
        self._inference_mode = torch.inference_mode()  # one object for all steps: making it costs as much as entering
        self._prompts = pipeline.prompt_logprobs(model.compute_logits)
        self._executable = backend.compile(self._device_step, None)

    def execute(self, scheduled: SchedulerOutput) -> StepFuture:
        """Starts one step. The host waits for the device in the future's `result()`, and nowhere else."""
        with self._inference_mode:
            return self._execute(scheduled)

    def _execute(self, scheduled: SchedulerOutput) -> StepFuture:
        for name in _UNBUILT:
            if getattr(scheduled, name) is not None:
                raise NotBuiltError(f"SchedulerOutput.{name}: the part that serves it is not built yet")
        clock = _Clock()
        self._update_rows(scheduled)
        self._connector.start_load(scheduled.connector_meta)
        clock.mark("rows")
        if not scheduled.num_rows:
            self._connector.idle()
            return self.backend.submit(lambda: None, (), lambda _: self._collect_empty(scheduled, clock))
        batch = self._inputs.prepare(scheduled, self.table.views)
        clock.mark("prepare")
        ctx = ForwardContext(self._plans(scheduled, batch))
        spans = () if scheduled.goes_on else self._prompts.spans(scheduled)
        clock.mark("plan")
        return self.backend.submit(
            self._executable, (batch, ctx, spans, clock), partial(self._collect, scheduled, batch, spans, clock)
        )

    def _plans(self, scheduled: SchedulerOutput, batch: InputBatch) -> dict[str, AttentionPlan]:
        """Attention of each KV group; a layerwise connector stands around every layer of a step that moves KV."""
        plans = {name: a.plan(batch, i) for i, (name, a) in enumerate(self._attention)}
        if self._connector.layerwise and scheduled.connector_meta is not None:
            return {name: LayerwisePlan(plan, self._connector) for name, plan in plans.items()}
        return plans

    def _device_step(self, batch: InputBatch, ctx: ForwardContext, spans: Sequence[Span], clock: _Clock) -> Computed:
        """What a backend compiles or captures: forward pass, sampler, commit. Reads no tensor on the host.

        Returns what `_collect` needs of the device: None for the sampler when no row samples, and the logprobs of the
        prompts' spans. The clock's marks are the host's own.
        """
        hidden = self.model.forward(self.model.embed(batch.input_ids), batch.positions, ctx).hidden
        logits = self._logits(hidden, batch)
        prompts = self._prompts.compute(hidden, spans) if spans else []
        clock.mark("forward")
        result = None if logits is None else self._sample(logits, batch)
        clock.mark("sample")
        self._post_update(batch, self._no_ids if result is None else result.ids)
        return result, prompts

    def _logits(self, hidden: torch.Tensor, batch: InputBatch) -> torch.Tensor | None:
        """Logits [L, V] of the rows that sample, None when no row does."""
        if not len(batch.logits_rows_np):
            return None
        return self.model.compute_logits(hidden.index_select(0, batch.logits_indices))

    def _sample(self, logits: torch.Tensor, batch: InputBatch) -> SampleResult:
        rows = self._inputs.logits_view(batch)
        result = self.pipeline.sample(logits, rows)
        self.pipeline.commit(rows, result.ids.unsqueeze(1), self._ones[: len(logits)])
        return result

    def _collect(
        self, scheduled: SchedulerOutput, batch: InputBatch, spans: Sequence[Span], clock: _Clock, computed: Computed
    ) -> StepOutput:
        """The step's output on the host: the only part that waits for the device."""
        result, prompts = computed
        prompt_logprobs = self._prompts.collect(spans, prompts) if spans else None
        one_each = scheduled.only_decodes
        num_valid = self._ones_np[: scheduled.num_rows] if one_each else scheduled.samples.astype(np.int32)
        transfers = self._transfers(scheduled)
        if result is None:
            clock.mark("post")
            none = np.full((scheduled.num_rows, 1), -1, np.int32)
            return StepOutput(none, num_valid, connector=transfers, timings=clock.seconds)
        sampled, logprobs, errors = self.pipeline.collect(result)
        at = batch.logits_rows_np
        if len(at) < scheduled.num_rows:
            ids, sampled = sampled, np.full(scheduled.num_rows, -1, np.int32)
            sampled[at] = ids
        output = StepOutput(
            sampled=sampled.reshape(-1, 1),
            num_valid=num_valid,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            connector=transfers,
            errors={int(at[i]): text for i, text in errors.items()} if errors else errors,
            payloads=self.pipeline.collect_payloads(result) if result.payloads else {},
            told=self.pipeline.collect_told(result) if result.payloads else {},
            timings=clock.seconds,
        )
        clock.mark("post")
        return output

    def _collect_empty(self, scheduled: SchedulerOutput, clock: _Clock) -> StepOutput:
        """The output of a step without rows."""
        transfers = self._transfers(scheduled)
        return StepOutput(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), connector=transfers, timings=clock.seconds)

    def _transfers(self, scheduled: SchedulerOutput) -> Transfers | None:
        """What the connector has to report after a step, None for nothing."""
        self._connector.wait_saves(scheduled.connector_meta)
        sent, received = self._connector.finished()
        failed = self._connector.failed_blocks()
        return Transfers(sent, received, failed) if sent or received or failed else None

    def close(self) -> None:
        """No transfer touches the KV memory afterwards."""
        self._connector.close()

    def _update_rows(self, scheduled: SchedulerOutput) -> None:
        """Rows that left are released before rows that arrive: an arriving request may take a row of this very step."""
        if scheduled.goes_on:
            self.table.apply(scheduled.new_block_ids)
            return
        for row in scheduled.preempted:
            self.pipeline.preempt(row)
        for row in (*scheduled.finished, *scheduled.preempted, *scheduled.aborted):
            self._prompts.release(row)
            self.pipeline.release(row)
            for _, attention in self._attention:
                attention.release(row)
        for new in scheduled.new:
            self._add(new)
        self.table.apply(scheduled.new_block_ids)
        if scheduled.new:
            self.pipeline.rows_applied()
        if scheduled.block_ops:
            self._move_blocks(scheduled)

    def _add(self, new: NewRequest) -> None:
        self.table.add(new)
        self.pipeline.add_request(new.req_idx, new.params, new)
        self._prompts.add(new)
        for _, attention in self._attention:
            attention.add_request(new.req_idx)

    def _move_blocks(self, scheduled: SchedulerOutput) -> None:
        ops = scheduled.block_ops
        if ops.swap_out:
            self._host_blocks.swap_out(ops.swap_out)
        if ops.copy:
            self.backend.copy_blocks(self.kv, self.kv_specs, ops.copy)
        if ops.swap_in:
            self._host_blocks.swap_in(ops.swap_in)
        if ops.zero:
            zeros = [torch.zeros_like(t) for t in self.backend.gather_blocks(self.kv, self.kv_specs, ops.zero)]
            self.backend.scatter_blocks(self.kv, self.kv_specs, ops.zero, zeros)

    def _post_update(self, batch: InputBatch, sampled: torch.Tensor) -> None:
        rows, logits_rows = len(batch.rows_np), len(batch.logits_rows_np)
        self.backend.step_ops.post_update(self._inputs.buffers, self.table.views, rows, logits_rows, sampled)


class _Clock:
    """Host seconds of the step's parts, each from the mark before it to its own."""

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def mark(self, part: str) -> None:
        now = perf_counter()
        self.seconds[part] = now - self._last
        self._last = now
