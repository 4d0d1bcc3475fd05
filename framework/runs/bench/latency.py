"""`bench=latency`: one request at a time, for a few lengths of its prompt: how long it waits, and each token takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from framework.interfaces import BenchRound
from framework.runs.bench.workload import Done, Work, check_lengths, ordinary_ids, pass_through, tokens
from framework.runs.options import SET_BY_WORKLOADS

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.runs.options import LatencyOptions


class Latency:
    """`interfaces.Bench`: nothing else runs beside the request, and nothing of it is in the prefix cache."""

    unread: ClassVar[Mapping[str, str]] = SET_BY_WORKLOADS
    needs_engine: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: LatencyOptions, config: Config) -> None:
        self._options = options
        self._check(config.engine.max_model_len)
        self.num_units = options.num_prompts * len(options.input_lens)
        kinds = ("TTFT", "TPOT") if options.output_len > 1 else ("TTFT",)
        self.units = {f"{kind}, {length} tokens in": "ms" for kind in kinds for length in options.input_lens}

    def check(self, engine: Engine) -> None:
        self._check(engine.admission.limits.max_model_len)

    def _check(self, limit: int | None) -> None:
        check_lengths(limit, max(self._options.input_lens), self._options.output_len, "bench.input_lens")

    def round(self, engine: Engine, number: int, advance: Callable[[int], Any]) -> BenchRound:
        o = self._options
        rng, ids = np.random.default_rng(o.seed), ordinary_ids(engine)
        figures: dict[str, float] = {}
        gaps: list[float] = []
        for length in o.input_lens:
            done: list[Done] = []
            for index in range(o.num_prompts):
                work = Work(tokens(rng, length, ids), o.output_len, 0.0, o.seed + index)
                done += pass_through(engine, [work], f"round {number}", False, advance)[0]
            figures[f"TTFT, {length} tokens in"] = 1e3 * float(np.median([one.ttft for one in done]))
            tpot = [one.metrics.tpot for one in done if one.metrics.tpot is not None]
            if tpot:
                figures[f"TPOT, {length} tokens in"] = 1e3 * float(np.median(tpot))
            gaps += [1e3 * gap for one in done for gap in one.metrics.itl]
        return BenchRound(figures, {"gap between tokens, ms": gaps} if gaps else {})
