"""`bench=throughput`: many requests at once, or arriving by chance: tokens a second, and what single requests wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from framework.interfaces import BenchRound
from framework.runs.bench.workload import (
    Done,
    Work,
    arrivals,
    check_lengths,
    lengths,
    ordinary_ids,
    pass_through,
    tokens,
)
from framework.runs.options import SET_BY_WORKLOADS

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.runs.options import ThroughputOptions


class Throughput:
    """`interfaces.Bench`: each round puts the same requests through the engine, with nothing in its prefix cache."""

    unread: ClassVar[Mapping[str, str]] = SET_BY_WORKLOADS
    needs_engine: ClassVar[bool] = True
    units: ClassVar[Mapping[str, str]] = {
        "output tokens": "1/s", "all tokens": "1/s", "requests": "1/s", "TTFT, median": "ms", "TTFT, p99": "ms",
        "TPOT, median": "ms", "TPOT, p99": "ms", "gap between tokens, p99": "ms", "whole round": "s",
    }  # fmt: skip
    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: ThroughputOptions, config: Config) -> None:
        self._options = options
        self.num_units = options.num_prompts
        self._check(config.engine.max_model_len)

    def check(self, engine: Engine) -> None:
        self._check(engine.admission.limits.max_model_len)

    def _check(self, limit: int | None) -> None:
        check_lengths(limit, self._options.input_len, self._options.output_len, "bench.input_len")

    def round(self, engine: Engine, number: int, advance: Callable[[int], Any]) -> BenchRound:
        work = self._work(engine)
        done, seconds = pass_through(engine, work, f"round {number}", self._options.detokenize, advance)
        return _figures(work, done, seconds)

    def _work(self, engine: Engine) -> list[Work]:
        o = self._options
        rng = np.random.default_rng(o.seed)
        inputs = lengths(rng, o.num_prompts, o.input_len_min, o.input_len)
        outputs = lengths(rng, o.num_prompts, o.output_len_min, o.output_len)
        due = arrivals(rng, o.num_prompts, o.rate)
        ids = ordinary_ids(engine)
        prompts = [tokens(rng, count, ids) for count in inputs]
        return [Work(*one, seed=o.seed + i) for i, one in enumerate(zip(prompts, outputs, due, strict=True))]


def _figures(work: list[Work], done: list[Done], seconds: float) -> BenchRound:
    outputs = sum(len(one.output.outputs[0].token_ids) for one in done)
    inputs = sum(len(one.token_ids) for one in work)
    ttft = [1e3 * one.ttft for one in done]
    tpot = [1e3 * one.metrics.tpot for one in done if one.metrics.tpot is not None]
    gaps = [1e3 * gap for one in done for gap in one.metrics.itl]
    figures = {
        "output tokens": outputs / seconds,
        "all tokens": (inputs + outputs) / seconds,
        "requests": len(done) / seconds,
        "TTFT, median": float(np.median(ttft)),
        "TTFT, p99": float(np.percentile(ttft, 99)),
        "whole round": seconds,
    }
    if tpot:  # requests of one token have none
        figures |= {
            "TPOT, median": float(np.median(tpot)),
            "TPOT, p99": float(np.percentile(tpot, 99)),
            "gap between tokens, p99": float(np.percentile(gaps, 99)),
        }
    return BenchRound(figures, {"TTFT, ms": ttft, "gap between tokens, ms": gaps})
