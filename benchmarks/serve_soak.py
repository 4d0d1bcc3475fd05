"""Minutes of mixed load on a server: streams, disconnects, bad bodies, oversize prompts, grammars, a pool too small.

    python benchmarks/serve_soak.py                          # 30 minutes
    python benchmarks/serve_soak.py --minutes 0.2 --round 4

The server is a process of its own. After each round of traffic there is a quiet moment: no request, row or block may
be left, and what a sample of the clients got is compared with `LLM.generate`, one request at a time. A line each, a
verdict at the end, and exit code 1 if that is bad.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from serve_traffic import Clients, Got, make_ask

from framework import LLM, SamplingParams
from framework.testing.served import Served

sys.path.append(str(Path(__file__).parent / "soak"))  # the model of that soak: its tokens hang on the whole context
from model import save_model

FIXED = ["engine.dtype=float32", "engine.batch_invariant=true", "kv_cache.block_size=8", "engine.max_model_len=128"]
TIGHT = ["kv_cache.num_blocks=25", "scheduler.max_num_seqs=8", "scheduler.max_num_batched_tokens=48",
         "engine.async_scheduling=true", "scheduler.preemption=swap", "server.max_waiting=40",
         "server.request_timeout=60"]  # fmt: skip
MAX_CLIENTS = 48
MAX_BYTES_A_REQUEST = 500.0
"""Growth of the server's memory. What is kept by mistake is a Request, an output or a task, of 2 kB and more; the
allocator's own pages come and go by megabytes, which 30 minutes of requests make small."""
MAX_FILES = 8
"""Open sockets at a quiet moment beyond those before the first request: of clients that have just gone."""
WARM_UP_SHARE = 0.3
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class Soak:
    """All that is seen. faults: what should not be, in words."""

    seed: int
    served: Served
    quiet: LLM
    start: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float]] = field(default_factory=list)  # (requests so far, MB) of each quiet moment
    faults: list[str] = field(default_factory=list)
    num_asked: int = 0
    num_compared: int = 0
    num_reported: int = 0

    def __post_init__(self) -> None:
        self.num_files = self.served.num_files

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.start) / 60

    async def traffic(self, seconds: float, rate: float) -> list[Got]:
        """Clients that come at random, `rate` a second, and what they got once all have gone."""
        arrivals, end = random.Random(f"{self.seed}/{self.num_asked}"), time.monotonic() + seconds
        running: set[asyncio.Task[Got]] = set()
        gone: list[Got] = []
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = Clients(self.served.url, self.served.model, session, self.counts)
            while time.monotonic() < end:
                if len(running) < MAX_CLIENTS:
                    running.add(asyncio.create_task(clients.play(make_ask(self.seed, self.num_asked))))
                    self.num_asked += 1
                await asyncio.sleep(arrivals.expovariate(rate))
                done = {task for task in running if task.done()}
                running -= done
                gone += [task.result() for task in done]
            gone += await asyncio.gather(*running)
        return gone

    def judge(self, got: Got) -> None:
        """By the manner of the client alone: which answers it may have, and whether they are complete."""
        ask, wanted = got.ask, {"bad": {400, 404}, "oversize": {400}, "vanish": {0}}.get(got.ask.manner, {200})
        if ask.manner != "vanish":
            wanted = wanted | {429}  # whoever comes while the queue is full is sent away, unread
        if got.status not in wanted:
            self.faults.append(f"request {ask.number} ({ask.manner}): status {got.status}, not {wanted} {got.errors}")
        elif got.errors:
            self.faults.append(f"request {ask.number} ({ask.manner}): {got.errors}")
        elif got.status == 200 and ask.manner != "leave" and not (got.is_done and len(got.reasons) == ask.params["n"]):
            self.faults.append(f"request {ask.number} ({ask.manner}) has no end: {got}")

    def compare(self, got: Got) -> None:
        """With the quiet run. Who left has the beginning of it."""
        self.num_compared += 1
        params = SamplingParams(**got.ask.params, output_kind="final")
        (right,) = self.quiet.generate({"prompt_token_ids": got.ask.prompt}, params, use_tqdm=False)
        for one in right.outputs:
            tokens, text = got.tokens.get(one.index, []), got.texts.get(one.index, "")
            is_whole = one.index in got.reasons
            if tokens != (one.token_ids if is_whole else one.token_ids[: len(tokens)]):
                self.faults.append(f"tokens of request {got.ask.number}: {tokens}, not {one.token_ids}: {got.ask}")
            if is_whole and (text, got.reasons[one.index]) != (one.text, one.finish_reason):
                self.faults.append(f"end of request {got.ask.number}: {text!r} {got.reasons[one.index]}, not {one}")

    async def round(self, seconds: float, rate: float, sample: int) -> None:
        gone = await self.traffic(seconds, rate)
        for got in gone:
            self.judge(got)
        held = await asyncio.to_thread(self.served.wait_until, self.is_idle)
        self.faults += [
            f"{name} is {held[f'framework:{name}']} at a quiet moment" for name in IDLE if held[f"framework:{name}"]
        ]
        if self.served.num_files > self.num_files + MAX_FILES:
            self.faults.append(f"{self.served.num_files} open files at a quiet moment, {self.num_files} at the start")
        told = [got for got in gone if got.status == 200 and got.tokens]
        for got in random.Random(self.num_asked).sample(told, min(sample, len(told))):
            self.compare(got)
        self.memory.append((self.num_asked, self.served.resident_mb))
        self.report(held)

    @staticmethod
    def is_idle(found: dict[str, float]) -> bool:
        return not any(found[f"framework:{name}"] for name in IDLE)

    def report(self, held: dict[str, float]) -> None:
        for fault in self.faults[self.num_reported :]:
            print(fault)
        self.num_reported = len(self.faults)
        print(
            f"{self.minutes:5.1f} min  {self.num_asked:6} requests  {self.num_compared:5} compared  "
            f"{self.memory[-1][1]:6.1f} MB  {self.served.num_files} files  {len(self.faults)} faults  "
            f"preemptions {held['framework:num_preemptions_total']:.0f}  "
            f"tokens {held['framework:generation_tokens_total']:.0f}",
            flush=True,
        )

    def verdict(self, is_long: bool) -> list[str]:
        """All that is wrong, in words."""
        wrong = list(self.faults)
        if "Traceback" in self.served.printed:
            wrong.append(self.served.printed[self.served.printed.index("Traceback") :][:3000])
        late = [one for one in self.memory if one[0] >= WARM_UP_SHARE * self.num_asked]
        if is_long and len(late) > 2:
            slope = 1e6 * statistics.linear_regression(*zip(*late, strict=True)).slope
            print(
                f"memory after warm-up: {late[0][1]:.1f} to {late[-1][1]:.1f} MB in {late[-1][0] - late[0][0]} "
                f"requests, {slope:+.1f} bytes a request (limit {MAX_BYTES_A_REQUEST:.0f})"
            )
            if slope > MAX_BYTES_A_REQUEST:
                wrong.append(f"memory grows by {slope:.0f} bytes a request")
        return wrong


def facts(given: argparse.Namespace) -> str:
    import torch

    words = " ".join(sys.argv[1:])
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}; "
        f"command: python benchmarks/serve_soak.py {words}; seed {given.seed}"
    )


async def run(soak: Soak, given: argparse.Namespace) -> None:
    while soak.minutes < given.minutes:
        await soak.round(given.round, given.rate, given.sample)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--round", type=float, default=27.0, help="seconds of traffic before each quiet moment")
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals a second")
    parser.add_argument("--sample", type=int, default=24, help="requests to compare at a quiet moment")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(facts(given))
    quiet_words = ["kv_cache.num_blocks=100", "kv_cache.prefix_caching=false"]
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name))
        with LLM(str(folder), overrides=[*FIXED, *quiet_words]) as quiet:
            with Served(f"model.path={folder}", *FIXED, *TIGHT) as served:
                soak = Soak(given.seed, served, quiet)
                asyncio.run(run(soak, given))
                code = served.stop()
            wrong = soak.verdict(is_long=given.minutes >= 10)
    wrong += [f"exit code {code}"] if code else []
    print("  ".join(f"{what} {count}" for what, count in sorted(soak.counts.items())))
    print(*wrong, sep="\n", file=sys.stderr)
    print(f"verdict: {len(wrong)} things are wrong" if wrong else "verdict: good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
