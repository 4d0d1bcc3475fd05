"""Minutes of all at once: arrivals, aborts, preemptions, stop strings, n > 1, faults of a connector, bad requests.

    python benchmarks/soak                         # 20 minutes on the CPU
    python benchmarks/soak --seconds 5 --round 2.5
    python benchmarks/soak --backend cuda --seconds 180

Two engines with pools that are too small: one lives through all of it, the other is made anew, in another setting, at
each quiet moment. At quiet moments nothing may be left of what was served, and what clients got is compared with a
run of one request at a time. A line each, a verdict at the end, and exit code 1 if that is bad.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import CHANGING, STEADY, leftovers, make_engine, make_quiet, warm_up
from measures import Measure, growth, measure
from model import save_model
from traffic import MANNERS, Got, make_ask, serve

from framework import LLM, AsyncLLM, SamplingParams

MAX_CLIENTS = 20
"""At one engine at a time: enough for its rows and for some that wait."""
WAIT_S = 400.0
"""For clients to end, once no new ones come: longer than a machine is paused, and than a connector may be silent."""
MAX_BYTES_A_REQUEST = 250.0
"""Growth of the resident memory. What is kept by mistake is a Request, an output or a listener with its lists, of 2 kB
and more: one left behind by each eighth request would be seen."""
MAX_OBJECTS_A_REQUEST = 0.02
"""Growth of the number of Python objects: a leak of one object by every fiftieth request."""
MAX_DEVICE_MB = 1.0
"""By which memory of a device may grow once every setting has run: tensors of steps that are still read."""
WARM_UP_MINUTES, WARM_UP_REQUESTS = 5.0, 13_000
"""Every setting has run by then, and all caches are full; the allocator's arenas fill with requests and not with time:
so many come in these minutes where nothing else runs."""
LEAST_MEASURES = 10
"""Behind the warm-up, to tell a slope from noise."""
COUNTERS = ("num_preemptions", "num_swap_outs", "num_swap_fallbacks", "num_failed_loads", "connector_hit_tokens",
            "prefix_hit_tokens")  # fmt: skip


@dataclass
class Soak:
    """All that is seen. faults: what should not be, in words."""

    seed: int
    folder: Path
    quiet: LLM
    backend: str
    start: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    engine_counts: Counter[str] = field(default_factory=Counter)  # of engines that have been closed
    measures: list[Measure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_asked: int = 0
    num_compared: int = 0
    num_shown: int = 0  # faults that have been printed

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.start) / 60

    async def traffic(self, llm: AsyncLLM, seconds: float, rate: float) -> list[Got]:
        """Clients that come at random, `rate` a second, for some seconds, and what they got once all have gone."""
        arrivals, end = random.Random(f"{self.seed}/{self.num_asked}"), time.monotonic() + seconds
        running: set[asyncio.Task[Got]] = set()
        gone: list[Got] = []
        while time.monotonic() < end:
            if len(running) < MAX_CLIENTS:
                running.add(asyncio.create_task(serve(llm, make_ask(self.seed, self.num_asked), self.counts)))
                self.num_asked += 1
            await asyncio.sleep(arrivals.expovariate(rate))
            running = await self._sweep(running, gone)
        _, late = await asyncio.wait(running, timeout=WAIT_S) if running else (None, ())
        if late:
            faulthandler.dump_traceback()
            raise TimeoutError(f"{len(late)} clients still wait after {WAIT_S:.0f} s: {late}")
        await self._sweep(running, gone)
        return gone

    async def _sweep(self, running: set[asyncio.Task[Got]], gone: list[Got]) -> set[asyncio.Task[Got]]:
        for task in [task for task in running if task.done()]:
            running.remove(task)
            gone.append(task.result())
        return running

    def compare(self, got: Got) -> None:
        """With the quiet run. Who did not read to the end has the beginning of it."""
        ask = got.ask
        self.num_compared += 1
        params = SamplingParams(**{**ask.params, "output_kind": "final"})
        (right,) = self.quiet.generate({"prompt_token_ids": ask.prompt}, params, use_tqdm=False)
        for i, one in enumerate(right.outputs[: len(got.tokens)]):
            has_ended = got.reasons[i][0] in ("stop", "length")
            wanted = one.token_ids if has_ended else one.token_ids[: len(got.tokens[i])]
            if got.tokens[i] != wanted:
                self.faults.append(f"tokens of request {ask.number}: {got.tokens[i]}, not {wanted}: {ask}")
            end = (got.texts[i], *got.reasons[i])
            if has_ended and end != (one.text, one.finish_reason, one.stop_reason):
                self.faults.append(f"end of request {ask.number}: {end}, not {one}: {ask}")
        if got.error is not None:
            self.faults.append(f"error of request {ask.number}: {got.error}")

    async def inspect(self, name: str, llm: AsyncLLM) -> dict[str, Any]:
        """Counters of an engine that should have nothing left."""
        stats = await llm.stats()
        self.faults += [f"{name} at {self.minutes:.1f} min: {what}" for what in leftovers(llm, stats)]
        return stats

    async def round(self, steady: AsyncLLM, changing: AsyncLLM, seconds: float, rate: float, sample: int) -> None:
        """Traffic, and a quiet moment behind it; `changing` is closed then."""
        both = await asyncio.gather(*(self.traffic(llm, seconds, rate) for llm in (steady, changing)))
        stats = [await self.inspect(name, llm) for name, llm in (("steady", steady), ("changing", changing))]
        for one in (got for gone in both for got in random.Random(self.num_asked).sample(gone, min(sample, len(gone)))):
            if one.tokens:
                self.compare(one)
        self.engine_counts.update({name: stats[1][name] for name in COUNTERS})
        changing.close()
        if len(asyncio.all_tasks()) > 1:
            self.faults.append(f"tasks left at {self.minutes:.1f} min: {asyncio.all_tasks()}")
        del both
        self.measures.append(measure(self.minutes, self.num_asked))
        print(*self.faults[self.num_shown :], sep="\n", end="", file=sys.stderr, flush=True)
        self.num_shown = len(self.faults)
        self.report({name: self.engine_counts[name] + stats[0][name] for name in COUNTERS})

    def report(self, counters: dict[str, int]) -> None:
        m = self.measures[-1]
        print(
            f"{m.minutes:5.1f} min  {m.num_requests:6} requests  {self.num_compared:5} compared  "
            f"{m.resident_mb:6.1f} MB  {m.device_mb:6.1f} MB on a device  {m.num_threads:2} threads  "
            f"{m.num_objects} objects  {len(self.faults)} faults  "
            + "  ".join(f"{name.removeprefix('num_')} {value}" for name, value in counters.items()),
            flush=True,
        )
        self.last_counters = counters

    def verdict(self, is_long: bool) -> list[str]:
        """All that is wrong, in words."""
        wrong = list(self.faults)
        late = [m for m in self.measures if m.minutes >= WARM_UP_MINUTES and m.num_requests >= WARM_UP_REQUESTS]
        threads = [m.num_threads for m in self.measures]
        if max(threads[len(CHANGING) :], default=0) > max(threads[: len(CHANGING)]):
            wrong.append(f"threads grow: {threads}")
        device = [m.device_mb for m in self.measures]
        if max(device[len(CHANGING) :], default=0) > max(device[: len(CHANGING)]) + MAX_DEVICE_MB:
            wrong.append(f"memory of the device grows: {device}")
        if is_long:
            wrong += [f"nothing of {name} in all that time" for name, n in self._seen().items() if not n]
            wrong += self._growing(late)
        return wrong

    def _seen(self) -> dict[str, int]:
        return {**{m: self.counts[m] for m in (*MANNERS, "whole", "stopped")}, **self.last_counters}

    def _growing(self, late: list[Measure]) -> list[str]:
        if len(late) < LEAST_MEASURES:
            return [f"too few requests to tell whether memory grows: it takes {WARM_UP_REQUESTS} to fill caches"]
        requests, minutes = [m.num_requests for m in late], [m.minutes for m in late]
        memory = [m.resident_mb for m in late]
        size = growth(requests, memory) * 1e6
        objects = growth(requests, [m.num_objects for m in late])
        print(
            f"last {minutes[-1] - minutes[0]:.1f} min, {requests[-1] - requests[0]} requests: resident memory "
            f"{growth(minutes, memory):+.3f} MB a minute, {size:+.1f} bytes a request "
            f"(limit {MAX_BYTES_A_REQUEST:.0f}); {objects:+.5f} objects a request (limit {MAX_OBJECTS_A_REQUEST})"
        )
        wrong = [f"memory grows by {size:.0f} bytes a request"] if size > MAX_BYTES_A_REQUEST else []
        return wrong + ([f"objects grow by {objects:.3f} a request"] if objects > MAX_OBJECTS_A_REQUEST else [])


async def run(soak: Soak, seconds: float, round_s: float, rate: float, sample: int) -> None:
    steady = make_engine(soak.folder, STEADY, soak.backend)
    try:
        number = 0
        while soak.minutes * 60 < seconds:
            words = CHANGING[number % len(CHANGING)]
            await soak.round(steady, make_engine(soak.folder, words, soak.backend), round_s, rate, sample)
            number += 1
    finally:
        steady.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--round", type=float, default=27.0, help="seconds of traffic before each quiet moment")
    parser.add_argument("--rate", type=float, default=30.0, help="arrivals a second at each engine")
    parser.add_argument("--sample", type=int, default=24, help="requests of each engine to compare at a quiet moment")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name))
        with make_quiet(folder, given.backend) as quiet:
            warm_up(quiet)
            soak = Soak(given.seed, folder, quiet, given.backend)
            asyncio.run(run(soak, given.seconds, given.round, given.rate, given.sample))
    wrong = soak.verdict(is_long=given.seconds > 2 * 60 * WARM_UP_MINUTES)
    print("  ".join(f"{what} {count}" for what, count in sorted(soak.counts.items())))
    print(*wrong[soak.num_shown :], sep="\n", file=sys.stderr)
    print(f"verdict: {len(wrong)} things are wrong" if wrong else "verdict: good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
