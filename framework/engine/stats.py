"""Counters of an engine and times of its requests. Pure bookkeeping: nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from framework.request import RequestMetrics

if TYPE_CHECKING:
    from framework.batch import SchedulerOutput, StepOutput

OVERHEAD_PARTS = ("schedule", "rows", "prepare", "plan", "post", "update")
"""Parts of a step outside forward and sampler: what the engine itself costs."""


@dataclass(slots=True)
class StepStats:
    """The last step, and sums over all steps.

    seconds by part: schedule, rows, prepare, plan, forward, sample, post, update.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: dict[str, float] = field(default_factory=dict)
    total_prefill_tokens: int = 0
    total_decode_tokens: int = 0

    def record(
        self, scheduled: SchedulerOutput, output: StepOutput, schedule_s: float, update_s: float, num_outputs: int
    ) -> None:
        """Adds one step. A row of one token is counted as a decode, a longer span as prefill."""
        self.num_steps += 1
        spans = scheduled.num_scheduled_tokens.tolist()  # few numbers: a list is summed sooner than an array
        self.num_rows, self.num_tokens = len(spans), sum(spans)
        self.num_output_tokens = num_outputs
        decodes = spans.count(1)
        self.num_prompt_tokens = self.num_tokens - decodes
        self.total_prefill_tokens += self.num_prompt_tokens
        self.total_decode_tokens += decodes
        self.seconds = {"schedule": schedule_s, **output.timings, "update": update_s}
        for part, value in self.seconds.items():
            self.total_seconds[part] = self.total_seconds.get(part, 0.0) + value

    def overhead_s(self) -> float:
        """Seconds of the last step outside forward and sampler."""
        return sum(self.seconds.get(part, 0.0) for part in OVERHEAD_PARTS)


class RequestTimer:
    """Turns the moments of one request into its `RequestMetrics`. Moments are monotonic seconds."""

    __slots__ = ("_added", "_first", "_last", "_num_tokens", "metrics")

    def __init__(self, arrival_time: float, added: float) -> None:
        self.metrics = RequestMetrics(arrival_time)
        self._added, self._first, self._last = added, 0.0, 0.0
        self._num_tokens = 0

    def tokens(self, now: float, count: int, first_scheduled: float | None) -> None:
        """`count` new tokens at `now`; tokens of one step after the first share its gap."""
        m = self.metrics
        if self._num_tokens == 0:
            m.queue_time = None if first_scheduled is None else first_scheduled - self._added
            m.ttft = now - self._added
            self._first = now
            m.itl.extend([0.0] * (count - 1))
        else:
            m.itl.append(now - self._last)
            m.itl.extend([0.0] * (count - 1))
        self._last = now
        self._num_tokens += count
        if self._num_tokens > 1:
            m.tpot = (now - self._first) / (self._num_tokens - 1)

    def snapshot(self) -> RequestMetrics:
        """The metrics so far, out of reach of later tokens."""
        return replace(self.metrics, itl=list(self.metrics.itl))

    def finish(self, now: float) -> None:
        self.metrics.e2e = now - self._added
