"""What the HTTP layer costs: throughput and time to the first token beside the engine without it, and many connections.

    python benchmarks/serve_http.py                                   # all parts, the default model
    python benchmarks/serve_http.py --part connections --tiny         # a model that costs next to nothing
    python benchmarks/serve_http.py --rounds 5 --out benchmarks/results/serve-http

throughput   the same requests at once, from a client's process and by LLM.generate, in turn: tokens a second
overhead     16 streams at a time, from a client's process and by AsyncLLM in this one, in turn: time to the first
             token; and of each stream what its reader waited beyond what the engine tells of it
connections  1,000 connections that say nothing, and 200 streams at a time: errors, and tokens a CPU second
Each measurement is a process of its own, the client as well. Medians over the rounds with their spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu import workload
from figures import Figure, Report

from framework.testing.served import Served

HERE = Path(__file__).resolve().parent
FIXED = ["engine.max_model_len=512", "kv_cache.prefix_caching=false"]
TINY_VOCAB = 256


@dataclass(frozen=True)
class Setting:
    """What is served: words of the command line, how many requests a measurement has, and where ids come from."""

    words: list[str]
    num_requests: int
    is_tiny: bool

    def work(self, count: int, seed: int = 0) -> list[tuple[list[int], int]]:
        made = workload(count, seed)
        return [([i % TINY_VOCAB for i in ids], n) for ids, n in made] if self.is_tiny else made


@contextmanager
def setting(is_tiny: bool, num_requests: int) -> Iterator[Setting]:
    """The default model, or one that counts: its steps take a millisecond, so that the HTTP layer shows."""
    words = [*FIXED, "scheduler.max_num_seqs=256", "kv_cache.num_blocks=2400"]
    if not is_tiny:
        yield Setting(words, num_requests, is_tiny)
        return
    import torch

    from framework.testing.crafted import save_crafted

    with tempfile.TemporaryDirectory() as name:
        folder = save_crafted(Path(name) / "model", torch.eye(TINY_VOCAB).roll(1, 1) * 9, max_len=512)
        yield Setting([f"model.path={folder}", "sampler.detokenize=false", *words], num_requests, is_tiny)


def client(served: Served, work: Sequence[Any], concurrency: int, **more: float) -> dict[str, Any]:
    """The record of a client's process. more: num_idle, pause_s. RuntimeError with what it says if it has none."""
    asked = {"url": served.url, "model": served.model, "work": work, "concurrency": concurrency, **more}
    done = subprocess.run(
        [sys.executable, str(HERE / "serve_client.py")], input=json.dumps(asked), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def checked(record: dict[str, Any]) -> dict[str, Any]:
    if record["errors"]:
        raise RuntimeError(f"{len(record['errors'])} errors, the first: {record['errors'][0]}")
    return record


def in_process(part: str, given: Setting) -> dict[str, Any]:
    """Runs this file again, for what the engine does without a server."""
    command = [sys.executable, __file__, "--inside", part, "-n", str(given.num_requests)]
    done = subprocess.run([*command, *given.words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------------- throughput


def throughput(given: Setting, rounds: int) -> list[Figure]:
    ours: dict[str, list[float]] = {"offline": [], "served": [], "ratio": []}
    for _ in range(rounds):
        ours["offline"].append(in_process("offline", given)["tok_s"])
        with Served(*given.words) as served:
            client(served, given.work(1), 1)
            record = checked(client(served, given.work(given.num_requests), given.num_requests))
        ours["served"].append(record["num_tokens"] / record["wall_s"])
        ours["ratio"].append(ours["served"][-1] / ours["offline"][-1])
    what = f"{given.num_requests} requests at once"
    return [
        Figure("throughput", f"LLM.generate, {what}", "tok/s", ours["offline"], is_rate=True),
        Figure("throughput", f"streams over HTTP, {what}", "tok/s", ours["served"], is_rate=True),
        Figure("throughput", "HTTP / LLM.generate, by round", "", ours["ratio"], is_rate=True),
    ]


def offline(words: Sequence[str], work: list[tuple[list[int], int]]) -> dict[str, Any]:
    from framework import LLM, SamplingParams

    def params(length: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)

    with LLM(overrides=list(words)) as llm:
        llm.generate([{"prompt_token_ids": work[0][0]}], params(work[0][1]), use_tqdm=False)
        prompts = [{"prompt_token_ids": ids} for ids, _ in work]
        start = time.perf_counter()
        llm.generate(prompts, [params(length) for _, length in work], use_tqdm=False)
        return {"tok_s": sum(length for _, length in work) / (time.perf_counter() - start)}


# --------------------------------------------------------------------------------------------------------- overhead


NUM_STREAMS = 16
NUM_TTFT, MAX_PROMPT, MAX_OUTPUT = 480, 32, 28
PAUSE_S = 0.1
"""At most, before a stream begins: about a step. Without it all would begin with the end of a step, of which one in the
engine's process hears before the next step begins, and one of another process just too late."""


def short(given: Setting) -> list[tuple[list[int], int]]:
    """Requests of short prompts and outputs: what is measured are their beginnings. Outputs differ in length, so that
    streams end one by one, and who follows does not queue behind 15 others who came in the same moment."""
    return [(prompt[:MAX_PROMPT], 4 + length % (MAX_OUTPUT - 3)) for prompt, length in given.work(NUM_TTFT, 1)]


def overhead(given: Setting, rounds: int) -> list[Figure]:
    names = ("inside", "served", "more", "beyond inside", "beyond", "own")
    ours: dict[str, list[float]] = {name: [] for name in names}
    pooled: dict[str, list[float]] = {"inside": [], "served": []}
    for _ in range(rounds):
        record = in_process("inside", given)
        with Served(*given.words) as served:
            client(served, given.work(1), 1)
            http = checked(client(served, short(given), NUM_STREAMS, pause_s=PAUSE_S))
            http["beyond_s"] = _beyond_engine(served, http)
        for key, beyond, of in (("inside", "beyond inside", record), ("served", "beyond", http)):
            pooled[key] += [1e3 * seconds for seconds in of["ttft_s"]]
            ours[key].append(1e3 * statistics.median(of["ttft_s"]))
            ours[beyond].append(1e3 * statistics.median(of["beyond_s"]))
        ours["more"].append(ours["served"][-1] - ours["inside"][-1])
        ours["own"].append(ours["beyond"][-1] - ours["beyond inside"][-1])
    what = f"p50 TTFT, {NUM_STREAMS} streams at a time"
    return [
        Figure("overhead", f"{what}, AsyncLLM", "ms", ours["inside"]),
        Figure("overhead", f"{what}, over HTTP", "ms", ours["served"]),
        Figure("overhead", "HTTP - AsyncLLM, by round", "ms", ours["more"]),
        Figure("overhead", "HTTP - AsyncLLM, all rounds, drawn anew", "ms", _differences(**pooled)),
        Figure("overhead", "p50 of a stream's TTFT beyond its engine's, AsyncLLM", "ms", ours["beyond inside"]),
        Figure("overhead", "p50 of a stream's TTFT beyond its engine's, over HTTP", "ms", ours["beyond"]),
        Figure("overhead", "the one more than the other, by round", "ms", ours["own"]),
    ]


def _differences(inside: Sequence[float], served: Sequence[float], num_draws: int = 1000) -> list[float]:
    """Bootstrap: differences of the medians of samples that are drawn out of the measured ones."""
    rng = random.Random(0)
    median = statistics.median
    return [
        median(rng.choices(served, k=len(served))) - median(rng.choices(inside, k=len(inside)))
        for _ in range(num_draws)
    ]


def _beyond_engine(served: Served, record: dict[str, Any]) -> list[float]:
    """Seconds of TTFT of the client's streams beyond what the engine tells of the same request, from its arrival to the
    first token. It tells of the last ones that ended."""
    with urllib.request.urlopen(f"{served.url}/live/events", timeout=30) as answer:
        line = next(line for line in answer if line.startswith(b"data: {"))
    told = {one["id"]: one["ttft_s"] for one in json.loads(line[6:])["ended"]}
    pairs = zip(record["ids"], record["ttft_s"], strict=True)
    return [seconds - told[name] for name, seconds in pairs if name in told]


async def inside(words: Sequence[str], work: list[tuple[list[int], int]]) -> dict[str, Any]:
    """The same streams by AsyncLLM: as many at a time, with the same pauses."""
    from framework import AsyncLLM, SamplingParams

    ttft_s: list[float] = []
    beyond_s: list[float] = []

    async def one(llm: AsyncLLM, prompt: list[int], length: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, output_kind="delta")
        start, first = time.perf_counter(), None
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            if first is None:
                first = time.perf_counter()
                beyond_s.append(first - start - output.metrics.ttft)
        assert first is not None, "a stream without outputs"
        ttft_s.append(first - start)

    async def worker(llm: AsyncLLM, left: Iterator[Any], pause: random.Random) -> None:
        for prompt, length in left:
            await asyncio.sleep(pause.uniform(0, PAUSE_S))
            await one(llm, prompt, length)

    async with AsyncLLM(overrides=list(words)) as llm:
        await one(llm, *work[0])
        ttft_s.clear()
        beyond_s.clear()
        left, pause = iter(work), random.Random(0)
        await asyncio.gather(*(worker(llm, left, pause) for _ in range(NUM_STREAMS)))
    return {"ttft_s": ttft_s, "beyond_s": beyond_s}


# ------------------------------------------------------------------------------------------------------ connections


NUM_IDLE, NUM_AT_ONCE = 1000, 200


def connections(given: Setting, rounds: int) -> list[Figure]:
    """Every stream is whole and every idle connection is served afterwards, or the part fails."""
    kept: dict[str, list[float]] = {name: [] for name in ("tok_s", "server", "client", "ttft", "memory")}
    work = [(prompt[:32], min(length, 48)) for prompt, length in given.work(NUM_AT_ONCE)]
    for _ in range(rounds):
        with Served(*given.words) as served:
            client(served, given.work(1), 1)
            cpu = served.cpu_s
            record = checked(client(served, work, NUM_AT_ONCE, num_idle=NUM_IDLE))
            if record["num_idle_alive"] != NUM_IDLE:
                raise RuntimeError(f"{record['num_idle_alive']} of {NUM_IDLE} idle connections were served at the end")
            kept["server"].append(record["num_tokens"] / (served.cpu_s - cpu))
            kept["memory"].append(served.resident_mb)
        kept["tok_s"].append(record["num_tokens"] / record["wall_s"])
        kept["client"].append(record["num_events"] / record["client_cpu_s"])
        kept["ttft"].append(1e3 * statistics.median(record["ttft_s"]))
    what = f"{NUM_AT_ONCE} streams beside {NUM_IDLE} idle connections"
    return [
        Figure("connections", what, "tok/s", kept["tok_s"], is_rate=True),
        Figure("connections", f"{what}, p50 TTFT", "ms", kept["ttft"]),
        Figure("connections", "tokens a CPU second of the server", "1/s", kept["server"], is_rate=True),
        Figure("connections", "events a CPU second of the client", "1/s", kept["client"], is_rate=True),
        Figure("connections", "memory of the server at the end", "MB", kept["memory"]),
    ]


PARTS: dict[str, Callable[[Setting, int], list[Figure]]] = {
    "throughput": throughput,
    "overhead": overhead,
    "connections": connections,
}


def facts(given: argparse.Namespace) -> dict[str, Any]:
    import fastapi
    import torch
    import uvicorn

    versions = {module.__name__: module.__version__ for module in (torch, fastapi, uvicorn)}
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items())
        + f", Python {platform.python_version()}",
        "model": "counting, steps of a millisecond" if given.tiny else "the default model",
        "command": "python benchmarks/serve_http.py " + " ".join(sys.argv[1:]),
        "load average before": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given again; all without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a model whose steps cost next to nothing")
    parser.add_argument("-n", type=int, default=32, help="requests of the throughput part")
    parser.add_argument("--out", type=Path, help="NAME of NAME.json and NAME.md")
    parser.add_argument("--inside", choices=("offline", "inside"), help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        print(json.dumps(alone(given)))
        return 0
    report = Report(given.out.name, given.out.parent) if given.out else Report("serve-http", None)
    report.facts = facts(given)
    with setting(given.tiny, given.n) as one:
        for name in given.part or PARTS:
            try:
                report.add(PARTS[name](one, given.rounds))
            except RuntimeError as error:
                report.fail(name, error)
    print(*report.errors, sep="\n", file=sys.stderr)
    return 1 if report.errors else 0


def alone(given: argparse.Namespace) -> dict[str, Any]:
    """What `in_process` asks for."""
    here = Setting(given.words, given.n, any(word.startswith("model.path=") for word in given.words))
    if given.inside == "offline":
        return offline(given.words, here.work(given.n))
    return asyncio.run(inside(given.words, short(here)))


if __name__ == "__main__":
    sys.exit(main())
