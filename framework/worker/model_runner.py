"""One step on the device: update rows, prepare the batch, plan attention, forward, sample, commit.

Knows no feature: a stage, a drafter or an attention plugin keeps its own state under the same `req_idx`. It decides
nothing either; the scheduler's output says what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from framework.batch import NULL_BLOCK, InputBatch, NewRequest, SchedulerOutput, StepOutput
from framework.errors import NotBuiltError
from framework.interfaces import CompilesAhead, ForwardContext, PrefersOwnShape
from framework.nulls import NoConnector
from framework.worker.host_blocks import HostBlocks
from framework.worker.input_batch import InputBuffers, num_ragged_tokens
from framework.worker.layerwise import LayerwisePlan
from framework.worker.padded import Executable, PaddedSteps, entered_blocks
from framework.worker.ragged import Forward, RaggedSteps
from framework.worker.step_clock import StepClock
from framework.worker.step_results import StepResults
from framework.worker.warm_steps import prompt_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.interfaces import (
        AttentionBackend,
        AttentionPlan,
        Backend,
        Bucket,
        KVConnector,
        KVGroup,
        KVSpec,
        Model,
        StepFuture,
    )
    from framework.sampling.captured import Variant
    from framework.sampling.logprobs import Measured
    from framework.sampling.pipeline import SamplerPipeline
    from framework.sampling.prompt_logprobs import Span
    from framework.sampling.sampled import SampleResult
    from framework.worker.request_table import RequestTable

    Computed = tuple[SampleResult | None, list[list[Measured]]]

_UNBUILT = (
    "encoder_inputs",
    "encoder_freed",
    "pooling_rows",
    "lora_slots",
    "kv_replay",
)
_beside_rows = attrgetter(*_UNBUILT, "grammar_rows")
_NOTHING_BESIDE = (None,) * (len(_UNBUILT) + 1)


class _Padded(NamedTuple):
    """What a padded step has in common with one that goes on from it.

    executable  None where the sampler runs behind the forward pass
    wanting     as in `SampleResult.of_rows`
    one_each    [R] ones
    """

    bucket: Bucket
    variant: Variant | None
    executable: Executable | None
    wanting: tuple[NDArray[np.int64], int] | None
    one_each: NDArray[np.int32]


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
        buckets: Sequence[Bucket],
        num_swap_blocks: int,
        connector: KVConnector,
    ) -> None:
        self.model, self.backend, self.table, self.pipeline = model, backend, table, pipeline
        self.kv, self.kv_specs = kv, kv_specs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._connector = connector
        self._connector.bind(backend, kv, kv_specs)
        self._is_connected = type(connector) is not NoConnector
        self._host_blocks = HostBlocks(backend, kv, kv_specs, num_swap_blocks)
        self._attention = [attention[group.name] for group in groups]
        group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self._group_of = [group_of[layer] for layer in sorted(group_of)]
        self._picky = [one for one in self._attention if isinstance(one, PrefersOwnShape)]
        self._inputs = InputBuffers(table.num_rows, max_num_batched_tokens, groups, backend, backend.max_in_flight)
        self._ones = torch.ones(table.num_rows, dtype=torch.int32, device=backend.device)
        self._no_ids = torch.zeros(0, dtype=torch.int64, device=backend.device)
        self._inference_mode = torch.inference_mode()  # one object for all steps: making it costs as much as entering
        self._prompts = pipeline.prompt_logprobs(model.compute_logits)
        self._results = StepResults(pipeline, self._prompts, connector, table.num_rows)
        self._executable = backend.compile(self._device_step, None)
        kinds = {one.caps.graph for one in self._attention}
        decodes = [b for b in buckets if b.query_len == 1 and "never" not in kinds]
        prompts = [b for b in buckets if b.query_len > 1 and b.tokens <= max_num_batched_tokens and kinds == {"always"}]
        self._padded = PaddedSteps(decodes, pipeline.captured, self._compile)
        self._ragged = RaggedSteps(prompts, self._compile_ragged)
        self._block_sizes = [group.block_size for group in groups]
        self._stay = [np.full(table.num_rows, NULL_BLOCK, np.int32) for _ in groups]
        self._last_padded: _Padded | None = None  # the last step, if it was one

    @property
    def num_padded(self) -> int:
        """How many padded steps `warm_up` makes."""
        return self._padded.num_buckets + len(self._ragged.at_start)

    def prompt_steps(self) -> Iterator[SchedulerOutput]:
        """Steps with prompts to run once before any request comes."""
        table = self.table
        return prompt_steps(table.num_rows, self._max_num_batched_tokens, table.max_model_len, len(table.block_table))

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Steps inside are no requests', and the connector hears of none of them: it would look for its own words."""
        connector = self._connector
        self._connector = self._results.connector = NoConnector()
        try:
            yield
        finally:
            self._connector = self._results.connector = connector

    def compile_ahead(self) -> None:
        """Compiles together what first steps need, where the backend does that."""
        if isinstance(self.backend, CompilesAhead):
            with self._inference_mode:
                self.backend.compile_ahead(self._first_steps(self.backend))

    def _first_steps(self, backend: CompilesAhead) -> Iterator[Callable[[], Any]]:
        """Steps to be called without being executed. First comes what compilers are likely to take longest for."""
        batches = [self._padded_batch(bucket) for bucket in backend.telling(self._padded.largest_first)]
        for batch in batches:
            for variant in self._padded.likely:
                yield partial(self._sample_anything, batch, variant)
        for scheduled in self._prompts_near_and_far():
            yield partial(self._whole_step, self._inputs.prepare(scheduled, self.table.views, goes_on=False))
        views, max_len = self.table.views, self.table.max_model_len
        for bucket in backend.telling(self._ragged.at_start):
            yield partial(self._ragged_forward, self._inputs.ragged_batch(bucket, views, max_len))
        for batch in batches:
            yield partial(self._padded_step, batch, self._padded.plain)

    def _prompts_near_and_far(self) -> Iterator[SchedulerOutput]:
        """Steps with prompts, and one at the end of the longest request: attention may have another kernel there."""
        for scheduled in self.prompt_steps():
            yield scheduled
            end = self.table.max_model_len - scheduled.num_scheduled_tokens
            if scheduled.num_rows == 1:
                yield replace(scheduled, num_computed_tokens=end)

    def _sample_anything(self, batch: InputBatch, variant: Variant) -> None:
        """The sampler of a padded step, of states that are no model's."""
        assert self.pipeline.captured is not None
        logits = self.model.compute_logits(self.model.embed(batch.input_ids))
        self.pipeline.captured.sample(logits, self._inputs.padded_rows(batch.rows_np, len(batch.rows_np)), variant)

    def _whole_step(self, batch: InputBatch) -> None:
        self._device_step(batch, ForwardContext(self._plans(batch)), (), StepClock("forward"))

    def warm_up(self) -> Iterator[Bucket]:
        """Makes the padded steps that any request needs; yields each bucket when it is done."""
        for bucket in self._ragged.at_start:
            with self._inference_mode:
                self._ragged.forward(bucket)
            yield bucket
        for bucket in self._padded.largest_first:
            with self._inference_mode:
                self._padded.warm_up(bucket)
            yield bucket

    def execute(self, scheduled: SchedulerOutput) -> StepFuture:
        """Starts one step. The host waits for the device in the future's `result()`, and nowhere else."""
        if scheduled.goes_on and (future := self._go_on(scheduled)) is not None:
            return future
        with self._inference_mode:
            return self._execute(scheduled)

    def _execute(self, scheduled: SchedulerOutput) -> StepFuture:
        for name in _UNBUILT:
            if getattr(scheduled, name) is not None:
                raise NotBuiltError(f"SchedulerOutput.{name}: the part that serves it is not built yet")
        clock = StepClock("rows")
        self._update_rows(scheduled)
        spans = () if scheduled.goes_on else self._prompts.spans(scheduled)
        bucket = self._bucket(scheduled, spans)
        entered = None if bucket is None else entered_blocks(scheduled, self._block_sizes)
        if entered is None:
            self.table.append_blocks(scheduled.new_block_ids)
        if scheduled.block_ops:
            self._move_blocks(scheduled)
        self._connector.start_load(scheduled.connector_meta)
        clock.mark("rows", then="prepare")
        if not scheduled.num_rows:
            self._connector.idle()
            return self.backend.submit(lambda: None, (), lambda _: self._results.empty(scheduled, clock))
        if bucket is not None:
            return self._execute_padded(scheduled, bucket, entered or self._stay, clock)
        goes_on, self._last_padded = scheduled.goes_on and self._last_padded is None, None
        ragged = None if spans else self._ragged_bucket(scheduled)
        if ragged is not None:
            return self._execute_ragged(scheduled, ragged, clock)
        batch = self._inputs.prepare(scheduled, self.table.views, goes_on=goes_on)
        clock.mark("prepare", then="plan")
        num_wanted = None if len(batch.logits_rows_np) else self._inputs.num_sampling
        ctx = ForwardContext(self._plans_of(scheduled, batch), wanted=self._wanted(batch, spans), num_wanted=num_wanted)
        clock.mark("plan", then="forward")
        return self.backend.submit(
            self._executable,
            (batch, ctx, spans, clock),
            partial(_arrived, clock, partial(self._results.collect, scheduled, batch.logits_rows_np, spans, clock)),
        )

    # -------------------------------------------------------------------------------------------- padded steps

    def _go_on(self, scheduled: SchedulerOutput) -> StepFuture | None:
        """The step before once more, with other blocks; None where more has to be done than to tell them.

        Such a step finds the caches full of weights, so what counts is how little of the host it touches.
        """
        last = self._last_padded
        if last is None or last.executable is None or self._is_connected or _beside_rows(scheduled) != _NOTHING_BESIDE:
            return None
        clock = StepClock("prepare")
        if not self._inputs.go_on(scheduled.rows, scheduled.new_block_ids):
            return None
        clock.mark("prepare", then="forward")
        collect = partial(self._results.going_on, scheduled, last.wanting, last.one_each, clock)
        future = self.backend.submit(last.executable, (), collect)
        clock.mark("forward")
        return future

    def _bucket(self, scheduled: SchedulerOutput, spans: Sequence[Span]) -> Bucket | None:
        """The padded shape that the step runs in, None for one that runs in its own."""
        if not scheduled.only_decodes or spans or self._moves_by_layer(scheduled):
            return None
        return self._padded.bucket(scheduled.num_rows)

    def _execute_padded(
        self, scheduled: SchedulerOutput, bucket: Bucket, entered: Sequence[NDArray[np.int32]], clock: StepClock
    ) -> StepFuture:
        rows = scheduled.rows
        variant = None if scheduled.grammar_rows is not None else self._variant(scheduled, bucket)
        wide = self._padded.with_logits(bucket) if variant is None else bucket
        executable = self._padded.executable(wide, variant)
        self._inputs.send_decodes(rows, entered)
        clock.mark("prepare", then="forward")
        wanting = None
        is_whole = variant is not None
        if variant is not None and variant.num_top is not None and self.pipeline.captured is not None:
            wanting = self.pipeline.captured.wanting(rows)
        one_each = self._results.one_each[: scheduled.num_rows]
        self._last_padded = _Padded(bucket, variant, executable if is_whole else None, wanting, one_each)
        if not is_whole:
            executable = partial(self._sample_padded, executable, scheduled, wide, clock)
        collect = partial(self._results.padded, scheduled, wanting, clock, is_whole=is_whole)
        future = self.backend.submit(executable, (), partial(_arrived, clock, collect))
        if is_whole:
            clock.mark("forward")
        return future

    def _variant(self, scheduled: SchedulerOutput, bucket: Bucket) -> Variant | None:
        if scheduled.goes_on and self._last_padded is not None and self._last_padded.bucket is bucket:
            return self._last_padded.variant
        return self._padded.variant(scheduled.rows)

    def _compile(self, bucket: Bucket, variant: Variant | None) -> Executable:
        """The executable of a bucket. All of its rows are padding while it is made."""
        self._inputs.send_decodes(self._stay[0][:0], [blocks[:0] for blocks in self._stay])
        batch = self._padded_batch(bucket)
        executable: Executable = self.backend.compile(partial(self._padded_step, batch, variant), bucket)
        return executable

    def _padded_batch(self, bucket: Bucket) -> InputBatch:
        return self._inputs.padded_batch(bucket.requests, self.table.views, self.table.max_model_len)

    @torch.inference_mode()  # a step that goes on does not enter it, which a recorded one needs not
    def _padded_step(self, batch: InputBatch, variant: Variant | None) -> torch.Tensor | SampleResult:
        """A whole step of decodes, from what the host has told to what it will read; logits [L, V] without a variant.

        Reads no value on the host that differs from step to step: what a backend records here serves any step.
        """
        n = len(batch.rows_np)
        self._inputs.receive(n)
        self.backend.step_ops.prepare_decodes(self._inputs.buffers, self.table.views, n)
        ctx = ForwardContext(self._plans(batch), num_tokens=self._inputs.num_decodes)
        logits = self.model.compute_logits(self._forward(batch, ctx))
        captured = self.pipeline.captured
        if variant is None or captured is None:
            return logits
        rows = self._inputs.padded_rows(batch.rows_np, n)
        result = captured.sample(logits, rows, variant)
        captured.commit(rows, result.ids.unsqueeze(1), self._ones[:n], variant)
        self._post_update(n, n, result.ids)
        return result

    def _sample_padded(
        self, forward: Executable, scheduled: SchedulerOutput, bucket: Bucket, clock: StepClock
    ) -> SampleResult:
        """What no executable does: samples and commits behind the forward pass of a padded step."""
        count = scheduled.num_rows
        logits = forward()[:count]
        clock.mark("forward", then="sample")
        rows = self._inputs.padded_rows(scheduled.rows, bucket.requests, scheduled.grammar_rows)
        result = self.pipeline.sample(logits, rows)
        self.pipeline.commit(rows, result.ids.unsqueeze(1), self._ones[:count])
        clock.mark("sample", then="post")
        self._post_update(count, count, result.ids)
        clock.mark("post")
        return result

    # --------------------------------------------------------------------------------- steps with prompts, padded

    def _ragged_bucket(self, scheduled: SchedulerOutput) -> Bucket | None:
        """The padded shape of a step with prompts whose forward pass is compiled; None where it runs in its own."""
        if scheduled.only_decodes or self._moves_by_layer(scheduled):
            return None
        bucket = self._ragged.bucket(scheduled.num_tokens, scheduled.num_rows)
        if bucket is not None and self._prefers_own_shape(scheduled):
            return None
        return bucket

    def _execute_ragged(self, scheduled: SchedulerOutput, bucket: Bucket, clock: StepClock) -> StepFuture:
        forward = self._ragged.forward(bucket)  # which may have to be made, in the buffers of the step
        batch = self._inputs.prepare(scheduled, self.table.views, goes_on=False, bucket=bucket)
        clock.mark("prepare", then="forward")
        collect = partial(self._results.collect, scheduled, batch.logits_rows_np, (), clock)
        return self.backend.submit(self._ragged_step, (forward, batch, clock), partial(_arrived, clock, collect))

    def _prefers_own_shape(self, scheduled: SchedulerOutput) -> bool:
        counts = scheduled.num_scheduled_tokens
        ends = scheduled.num_computed_tokens + counts
        return any(one.prefers_own_shape(counts, ends) for one in self._picky)

    def _compile_ragged(self, bucket: Bucket) -> Forward:
        """The forward pass of a bucket. All of its tokens are padding while it is made."""
        views = self.table.views
        self._inputs.prepare_nothing(views, bucket)
        batch = self._inputs.ragged_batch(bucket, views, self.table.max_model_len)
        forward = partial(self._ragged_forward, batch)
        return Forward(forward, lambda step: self.backend.compile(step, bucket))

    def _ragged_forward(self, batch: InputBatch) -> torch.Tensor:
        """Hidden states [L, H] of the rows that sample, from the step's tensors alone."""
        wanted = self._wanted(batch, ())
        num_wanted = None if wanted is None else self._inputs.num_sampling
        ctx = ForwardContext(
            self._plans(batch), wanted=wanted, num_tokens=num_ragged_tokens(batch), num_wanted=num_wanted
        )
        return self._of_rows(self._forward(batch, ctx), batch)

    def _ragged_step(self, forward: Forward, batch: InputBatch, clock: StepClock) -> Computed:
        """What is behind the forward pass, in the step's own shape."""
        hidden, count = forward(), len(batch.logits_rows_np)
        logits = self.model.compute_logits(hidden[:count]) if count else None
        return self._behind_forward(logits, batch, clock), []

    # ------------------------------------------------------------------------------------- steps of their own shape

    def _plans(self, batch: InputBatch) -> list[AttentionPlan]:
        """Attention of each layer."""
        return self._of_layers([attention.plan(batch, group) for group, attention in enumerate(self._attention)])

    def _of_layers(self, plans: Sequence[AttentionPlan]) -> list[AttentionPlan]:
        return [plans[group] for group in self._group_of]

    def _plans_of(self, scheduled: SchedulerOutput, batch: InputBatch) -> list[AttentionPlan]:
        """As `_plans`; a layerwise connector stands around every layer of a step that moves KV."""
        if not self._moves_by_layer(scheduled):
            return self._plans(batch)
        plans = [attention.plan(batch, group) for group, attention in enumerate(self._attention)]
        return self._of_layers([LayerwisePlan(plan, self._connector) for plan in plans])

    def _moves_by_layer(self, scheduled: SchedulerOutput) -> bool:
        return self._connector.layerwise and scheduled.connector_meta is not None

    def _forward(self, batch: InputBatch, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states of the batch's tokens, or of those that ctx wants."""
        return self.model.forward(self.model.embed(batch.input_ids), batch.positions, ctx).hidden

    def _wanted(self, batch: InputBatch, spans: Sequence[Span]) -> torch.Tensor | None:
        """The tokens whose hidden states are read, None for all. One stands for none: tensors are not empty then."""
        if spans or len(batch.logits_rows_np) == batch.positions.shape[0]:
            return None
        return batch.logits_indices if len(batch.logits_rows_np) else self._inputs.buffers.arange[:1]

    def _device_step(self, batch: InputBatch, ctx: ForwardContext, spans: Sequence[Span], clock: StepClock) -> Computed:
        """What a backend compiles or captures: forward pass, sampler, commit. Reads no tensor on the host.

        Returns what `StepResults.collect` needs of the device: None for the sampler when no row samples, and the
        logprobs of the prompts' spans. The clock's marks are the host's own.
        """
        hidden = self._forward(batch, ctx)
        logits = self._logits(hidden, batch)
        prompts = self._prompts.compute(hidden, spans) if spans else []
        return self._behind_forward(logits, batch, clock), prompts

    def _behind_forward(self, logits: torch.Tensor | None, batch: InputBatch, clock: StepClock) -> SampleResult | None:
        """Samples and commits; None when no row samples."""
        clock.mark("forward", then="sample")
        result = None if logits is None else self._sample(logits, batch)
        clock.mark("sample", then="post")
        ids = self._no_ids if result is None else result.ids
        self._post_update(len(batch.rows_np), len(batch.logits_rows_np), ids)
        clock.mark("post")
        return result

    def _logits(self, hidden: torch.Tensor, batch: InputBatch) -> torch.Tensor | None:
        """Logits [L, V] of the rows that sample, None when no row does."""
        if not len(batch.logits_rows_np):
            return None
        return self.model.compute_logits(self._of_rows(hidden, batch))

    def _of_rows(self, hidden: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Hidden states [L, H] of the rows that sample, of a model that may have computed no others."""
        is_whole = len(hidden) == batch.positions.shape[0]
        return hidden.index_select(0, batch.logits_indices) if is_whole else hidden

    def _sample(self, logits: torch.Tensor, batch: InputBatch) -> SampleResult:
        rows = self._inputs.logits_view(batch)
        result = self.pipeline.sample(logits, rows)
        self.pipeline.commit(rows, result.ids.unsqueeze(1), self._ones[: len(logits)])
        return result

    def close(self) -> None:
        """No transfer touches the KV memory afterwards."""
        self._connector.close()

    def _update_rows(self, scheduled: SchedulerOutput) -> None:
        """Rows that left are released before rows that arrive: an arriving request may take a row of this very step."""
        if scheduled.goes_on:
            return
        for row in scheduled.preempted:
            self.pipeline.preempt(row)
        for row in (*scheduled.finished, *scheduled.preempted, *scheduled.aborted):
            self._prompts.release(row)
            self.pipeline.release(row)
            for attention in self._attention:
                attention.release(row)
        for new in scheduled.new:
            self._add(new)
        if scheduled.new:
            self.table.apply()
            self.pipeline.rows_applied()

    def _add(self, new: NewRequest) -> None:
        self.table.add(new)
        self.pipeline.add_request(new.req_idx, new.params, new)
        self._prompts.add(new)
        for attention in self._attention:
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

    def _post_update(self, num_rows: int, num_logits: int, sampled: torch.Tensor) -> None:
        self.backend.step_ops.post_update(self._inputs.buffers, self.table.views, num_rows, num_logits, sampled)


def _arrived(clock: StepClock, collect: Callable[[Any], StepOutput], value: Any) -> StepOutput:
    """The output of a step that the host has waited for."""
    clock.mark("wait", then="post")
    return collect(value)
