"""Counters of an engine and times of its requests. Pure bookkeeping: nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from framework.request import RequestMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from framework.batch import SchedulerOutput

OVERHEAD_PARTS = ("schedule", "rows", "prepare", "plan", "post", "update")
"""Parts of a step outside forward and sampler: what the engine itself costs."""
_SUMMED_AT_ONCE = 64
"""Steps whose seconds are added up in one go."""


@dataclass(slots=True)
class StepStats:
    """The last step, and sums over all steps.

    seconds by part: schedule, rows, prepare, plan, forward, sample, wait, post, update. Where the device is not the
    host, forward and sample are started in their parts, and waited for in `wait`.
    num_prompt_tokens, total_prefill_tokens  tokens computed that stand in a prompt, those of a resumed request again
    num_output_tokens, total_decode_tokens   tokens that requests got, their first ones included
    prefill_s, decode_s                      seconds of the steps that computed prompt tokens, and of all others
    decode_step_tokens                       tokens that requests got in those others
    steps_by_tokens                          {tokens computed in a step: number of such steps}
    """

    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    total_prefill_tokens: int = 0
    total_decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_step_tokens: int = 0
    steps_by_tokens: dict[int, int] = field(default_factory=dict)
    _totals: dict[str, float] = field(default_factory=dict)
    _unsummed: list[dict[str, float]] = field(default_factory=list)

    @property
    def total_seconds(self) -> dict[str, float]:
        """Seconds by part over all steps; a view of the sums, which later steps change."""
        for seconds in self._unsummed:
            for part, value in seconds.items():
                self._totals[part] = self._totals.get(part, 0.0) + value
        self._unsummed.clear()
        return self._totals

    def record(
        self, scheduled: SchedulerOutput, num_output_tokens: int, seconds: dict[str, float], wall_s: float
    ) -> None:
        """Adds one step. wall_s: what it added to the time of the steps before it, which may overlap it."""
        self.num_steps += 1
        # few numbers: a list is summed sooner than an array
        self.num_rows = num_rows = scheduled.num_rows
        self.num_tokens = num_tokens = (
            num_rows if scheduled.only_decodes else sum(scheduled.num_scheduled_tokens.tolist())
        )
        self.steps_by_tokens[num_tokens] = self.steps_by_tokens.get(num_tokens, 0) + 1
        self.num_prompt_tokens, self.num_output_tokens = scheduled.num_prompt_tokens, num_output_tokens
        self.total_prefill_tokens += self.num_prompt_tokens
        self.total_decode_tokens += num_output_tokens
        if self.num_prompt_tokens:
            self.prefill_s += wall_s
        else:
            self.decode_s += wall_s
            self.decode_step_tokens += num_output_tokens
        self.seconds = seconds
        self._unsummed.append(seconds)
        if len(self._unsummed) >= _SUMMED_AT_ONCE:
            _ = self.total_seconds


class RequestTimer:
    """Turns the moments of one request with n completions into its `RequestMetrics`. Moments are monotonic seconds.

    Times between tokens are those between tokens of one completion.
    """

    __slots__ = ("_added", "_first", "_last", "_num_tokens", "metrics")

    def __init__(self, arrival_time: float, added: float, n: int = 1) -> None:
        self.metrics = RequestMetrics(arrival_time)
        self._added = added
        self._first, self._last, self._num_tokens = [0.0] * n, [0.0] * n, [0] * n

    def tokens(self, now: float, count: int, first_scheduled: float | None, index: int = 0) -> None:
        """`count` new tokens of completion `index` at `now`; tokens of one step after the first share its gap."""
        m = self.metrics
        if m.ttft is None:
            m.queue_time = None if first_scheduled is None else first_scheduled - self._added
            m.ttft = now - self._added
        if self._num_tokens[index] == 0:
            self._first[index] = now
        else:
            m.itl.append(now - self._last[index])
        m.itl.extend([0.0] * (count - 1))
        self._last[index] = now
        self._num_tokens[index] += count

    def steps(
        self, moments: Sequence[float], gaps: Sequence[float], first_scheduled: float | None, indices: Sequence[int]
    ) -> None:
        """One new token of each of some completions at each of the moments; gaps: the times between these."""
        for index in indices:
            self.tokens(moments[0], 1, first_scheduled, index)
            self._last[index] = moments[-1]
            self._num_tokens[index] += len(gaps)
        self.metrics.itl += gaps if len(indices) == 1 else [gap for gap in gaps for _ in indices]

    def snapshot(self) -> RequestMetrics:
        """The metrics so far, out of reach of later tokens."""
        return replace(self.metrics, itl=list(self.metrics.itl), tpot=self._tpot())

    def finish(self, now: float) -> None:
        self.metrics.e2e, self.metrics.tpot = now - self._added, self._tpot()

    def _tpot(self) -> float | None:
        """Mean over the completions of two tokens and more, each with its own mean; None without any."""
        each = zip(self._first, self._last, self._num_tokens, strict=True)
        means = [(last - first) / (count - 1) for first, last, count in each if count > 1]
        return sum(means) / len(means) if means else None
