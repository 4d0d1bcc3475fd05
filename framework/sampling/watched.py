"""A pipeline that tells what each stage did to each row of a step: what a trace records and a replay compares.

The stages run a second time, one by one on a copy of the logits, and a digest says what stands behind each of them;
tokens are drawn as everywhere. The builder puts it in the pipeline's place when digests are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework.sampling.interval import open_interval
from framework.sampling.pipeline import SamplerPipeline
from framework.sampling.sampled import DRAWS, SampleResult
from framework.sampling.trail import ARGMAX, LOGITS, SEED, WATCHED, Trail, WatchedRows
from framework.sent import sent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import Rows
    from framework.sampling.deployed import Deployed

    Interval = tuple[Tensor, Tensor]
    Measure = Callable[[Tensor, Interval | None], Tensor]  # [n, V] logits, and [n] bounds behind thresholds, to [n]


def digest(values: Tensor) -> Tensor:
    """[L, n] float32 -> [L] int64: bits times an odd number that their place gives, summed modulo 2^64.

    Integers add up the same in any order, so equal rows have equal digests on every device. -0.0 counts as 0.0.
    """
    bits = (values + 0.0).contiguous().view(torch.int32).long()
    place = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 0x1E3779B97F4A7C15
    place = (place ^ (place >> 29)) * 0x3F58476D1CE4E5B9
    return (bits * (place | 1)).sum(1)


def _digest(work: Tensor, interval: Interval | None) -> Tensor:
    return digest(work if interval is None else torch.stack(interval, 1))


class WatchedPipeline(SamplerPipeline):
    """The pipeline itself, with its stages and rows, and `WatchedRows` among the payloads of each step that samples."""

    def __init__(self, pipeline: SamplerPipeline, *, keep_logits: bool = False) -> None:
        vars(self).update(vars(pipeline))  # the very same stages and rows: admission and runner hold one state
        self.captured = None  # a recorded sampler tells nothing of its stages
        self._keep_logits = keep_logits

    def sample(self, logits: Tensor, rows: Rows) -> SampleResult:
        steps = self._walk(logits, rows, _digest)
        kept = logits.clone() if self._keep_logits else None
        result = super().sample(logits, rows)
        each = self._bits[rows.req_idx_np].copy()  # rows may change hands before the step is collected
        result.payloads[WATCHED] = _Watched(steps.keys, steps.bits, each, torch.stack(steps.values), rows.seed, kept)
        return result

    def collect_payloads(self, result: SampleResult) -> dict[str, Any]:
        watched, ids = result.payloads[WATCHED], result.told.tolist()
        trails = [self._trail(watched, row, token) for row, token in enumerate(ids)]
        return {**super().collect_payloads(result), WATCHED: WatchedRows(trails, watched.logits)}

    def _trail(self, watched: _Watched, row: int, token: int) -> Trail:
        bits, before = int(watched.each[row]) | _EVERY_ROW, 0
        draws = bits & DRAWS
        trail: list[tuple[str, str | int]] = [(SEED, _hex(int(watched.seed[row])))] if draws else []
        columns = zip(watched.keys, watched.bits, watched.digests[:, row].tolist(), strict=True)
        for key, bit, value in columns:
            if key is not None and bit & bits and value != before:
                trail.append((key, _hex(value)))
            before = value if bit & bits else before
        return [*trail, (self._select.key if draws or self._all_greedy else ARGMAX, token)]

    def forbids(self, logits: Tensor, rows: Rows, token: int) -> str | None:
        """The first stage behind which a row, the only one, cannot draw the token; None where it can."""
        bits = int(self._bits[rows.req_idx_np[0]])

        def allows(work: Tensor, interval: Interval | None) -> Tensor:
            value = work[:, token]
            kept = value > -torch.inf
            return (kept if interval is None else kept & (interval[0] <= value) & (value <= interval[1])).long()

        steps = self._walk(logits, rows, allows)
        columns = zip(steps.keys, steps.bits, torch.stack(steps.values)[:, 0].tolist(), strict=True)
        return next(
            (key for key, bit, is_allowed in columns if key is not None and bit & bits and not is_allowed), None
        )

    def _walk(self, logits: Tensor, rows: Rows, measure: Measure) -> _Steps:
        """The stages one by one, as `sample` runs them without a backend's operations, and what is behind each."""
        plan, steps = self._plan(rows), _Steps()
        work = logits.float().clone()
        steps.add(LOGITS, _EVERY_ROW, measure(work, None))
        for one in self._running(self._shared, plan):
            self._apply([one], work, rows)
            steps.add(one.key, one.bit, measure(work, None))
        if plan.random is not None:
            index = sent(plan.random, work.device)
            self._walk_random(work.index_select(0, index), rows.at(index, plan.random), index, steps, measure)
        return steps

    def _walk_random(self, work: Tensor, rows: Rows, index: Tensor, steps: _Steps, measure: Measure) -> None:
        def place(interval: Interval | None) -> Tensor:
            return torch.zeros_like(steps.values[0]).index_copy(0, index, measure(work, interval))

        bits = int(np.bitwise_or.reduce(self._bits[rows.req_idx_np]))
        for one in self._of(self._reshaping, bits):
            self._apply([one], work, rows)
            steps.add(one.key, one.bit, place(None))
        interval = open_interval(len(work), work.device)
        steps.add(None, DRAWS, place(interval))
        for one in self._of(self._thresholds, bits):
            interval = one.stage.bounds(work, rows, *interval)
            steps.add(one.key, one.bit, place(interval))

    @staticmethod
    def _of(stages: list[Deployed], bits: int) -> list[Deployed]:
        return [one for one in stages if one.bit & bits]


_EVERY_ROW = 1 << 64
"""A bit beyond those of rows, for what concerns all of them."""


@dataclass
class _Steps:
    """keys: of the stages that ran, None where a new chain begins; bits: of the rows that want each; values: [L] each,
    measured behind it."""

    keys: list[str | None] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, key: str | None, bit: int, value: Tensor) -> None:
        self.keys.append(key)
        self.bits.append(bit)
        self.values.append(value)


@dataclass
class _Watched:
    """What a step leaves on the device for `collect_payloads`. each [L] bits of the rows; digests [stages, L] int64."""

    keys: list[str | None]
    bits: list[int]
    each: NDArray[np.uint64]
    digests: Tensor
    seed: Tensor
    logits: Tensor | None


def _hex(value: int) -> str:
    return f"{value % (1 << 64):016x}"
