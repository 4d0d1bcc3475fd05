"""What a step gives back: its `StepOutput`, made of what the host has waited for. Called by the model runner.

What the device computed is on the host by then; only a connector's saves may be waited for. Rows that did not sample
have -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from framework.batch import SchedulerOutput, StepOutput, Transfers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.interfaces import KVConnector
    from framework.sampling.logprobs import Measured
    from framework.sampling.pipeline import SamplerPipeline
    from framework.sampling.prompt_logprobs import PromptLogprobs, Span
    from framework.sampling.sampled import SampleResult
    from framework.worker.step_clock import StepClock

    Computed = tuple[SampleResult | None, list[list[Measured]]]


class StepResults:
    """Outputs of the steps of one runner, with at most num_rows rows each.

    connector  asked for what it has moved; another one may take its place
    """

    def __init__(
        self, pipeline: SamplerPipeline, prompts: PromptLogprobs, connector: KVConnector, num_rows: int
    ) -> None:
        self._pipeline, self._prompts, self.connector = pipeline, prompts, connector
        self.every_row = np.arange(num_rows, dtype=np.int32)
        self.one_each = np.ones(num_rows, np.int32)
        """Never written, as `every_row`: steps of decodes take the beginning of both."""

    def collect(
        self,
        scheduled: SchedulerOutput,
        at: NDArray[np.int32],
        spans: Sequence[Span],
        clock: StepClock,
        computed: Computed,
    ) -> StepOutput:
        """The step's output; at: batch row of each logits row. What was computed is on the host."""
        result, prompts = computed
        prompt_logprobs = self._prompts.collect(spans, prompts) if spans else None
        one_each = scheduled.only_decodes
        num_valid = self.one_each[: scheduled.num_rows] if one_each else scheduled.samples.astype(np.int32)
        transfers = self._transfers(scheduled)
        if result is None:
            clock.mark("post")
            none = np.full((scheduled.num_rows, 1), -1, np.int32)
            return StepOutput(none, num_valid, connector=transfers, timings=clock.seconds)
        sampled, logprobs, errors = self._pipeline.collect(result)
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
            payloads=self._pipeline.collect_payloads(result) if result.payloads else {},
            told=self._pipeline.collect_told(result) if result.payloads else {},
            timings=clock.seconds,
        )
        clock.mark("post")
        return output

    def padded(
        self,
        scheduled: SchedulerOutput,
        wanting: tuple[NDArray[np.int64], int] | None,
        clock: StepClock,
        result: SampleResult,
        *,
        is_whole: bool,
    ) -> StepOutput:
        """The output of a padded step of decodes. is_whole: it has sampled in the padded shape; wanting as in
        `SampleResult.of_rows`."""
        if is_whole:
            result = result.of_rows(scheduled.rows, wanting)
        return self.collect(scheduled, self.every_row[: scheduled.num_rows], (), clock, (result, []))

    def going_on(
        self,
        scheduled: SchedulerOutput,
        wanting: tuple[NDArray[np.int64], int] | None,
        one_each: NDArray[np.int32],
        clock: StepClock,
        result: SampleResult,
    ) -> StepOutput:
        """The output of a padded step that was the one before it once more. one_each: [R] ones."""
        clock.mark("wait", then="post")
        tokens = None if wanting is not None else result.tokens(len(one_each))
        if tokens is None:
            return self.padded(scheduled, wanting, clock, result, is_whole=True)
        output = StepOutput(tokens, one_each, timings=clock.seconds)
        clock.mark("post")
        return output

    def empty(self, scheduled: SchedulerOutput, clock: StepClock) -> StepOutput:
        """The output of a step without rows."""
        transfers = self._transfers(scheduled)
        return StepOutput(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), connector=transfers, timings=clock.seconds)

    def _transfers(self, scheduled: SchedulerOutput) -> Transfers | None:
        """What the connector has to report after a step, None for nothing."""
        self.connector.wait_saves(scheduled.connector_meta)
        sent, received = self.connector.finished()
        failed = self.connector.failed_blocks()
        return Transfers(sent, received, failed) if sent or received or failed else None
