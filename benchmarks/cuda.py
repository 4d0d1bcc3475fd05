"""The CUDA engine beside the floor of each figure, on one device: tokens a second, decode steps, prompts, start-up.

    python benchmarks/cuda.py --shape qwen3-0.6b --out FOLDER             # all parts, in minutes
    python benchmarks/cuda.py --shape llama-3.1-8b --parts b --reps 1     # decode steps alone, once each
    python benchmarks/cuda.py --parts bi engine.batch_invariant=true      # words of the configuration, as anywhere

Weights are random (`engine.load_format=dummy`) and the prefix cache is off. Parts: `a` 256 requests at once, `b` decode
steps and the host's share of them, `c` as `a` with dearer sampling, `d` one prompt of 8192 tokens, `p` what a profiler
sees of a decode step; `i`, only where it is asked for, whether a request's tokens and logits have the same bits in any
company (with `kv_cache.prefix_caching=true` also behind a hit). Start-up is always told. Floors follow from the copy
bandwidth and the matrix product's rate that the same run measures: `floors.py`. `--out` gets cuda-SHAPE.json,
cuda-SHAPE.md and the profiler's traces.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from figures import HEAD, Figure, Report
from floors import SHAPES, Ceilings, Work

BEGIN = time.perf_counter()
PARTS, MORE_PARTS = "abdcp", "i"
BATCHES = (1, 16, 64, 256)
REQUESTS, SHORTEST, LONGEST = 256, 100, 1024
DECODE_PROMPT, DECODE_OUTPUT = 896, 192
HOST_STEPS, TIMED_STEPS = range(48, 80), range(96, 184)
CONTEXT = 1040
"""Keys that a decode reads in the middle of TIMED_STEPS."""
LONG_PROMPT, LONG_RUNS, LONG_WARM = 8192, 7, 2
MAX_MODEL_LEN = 9216
INVARIANT_PROMPT, COMPANIES = 1500, (0, 1, 3, 15, 63, 255)
TEMPERATURE = 0.6
CASES: dict[str, dict[str, Any]] = {
    "top_p 0.9, top_k 50": {"top_p": 0.9, "top_k": 50},
    "logprobs 5": {"logprobs": 5},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
}
HOST_PARTS = ("schedule", "rows", "prepare", "plan", "forward", "sample", "post", "update")
"""Of `StepStats.seconds`: all but the wait. A step that is one graph has its launch in `forward`."""
KERNELS = {
    "experts": r"\b(route|gated_rows|summed_rows|grouped|combine)_kernel",
    "latents": r"\b(absorb|expand|gather|store|list_queries|list_prompts|latent_decode|latent_prompt)_kernel",
    "attention": r"\b(decode|prompt|items|write|turn)_kernel",
    "matrices": r"gemm|gemv|nvjet|cutlass|splitK|(few_rows|matrix|split|wide)_kernel",
    "norms, gate, rotation": r"\b(norm|gate|cap|rotate)_kernel",
    "sampling": r"\b(group|choose|settle|apply|logprobs)_kernel",
    "step": r"\b(prepare|decodes|post_update|inbox|outbox|rows|spans)_kernel",
}
"""Kinds of kernels by their names; whatever else a device does is `other`."""


# --------------------------------------------------------------------------------------------------------- workload


def workload(count: int = REQUESTS, seed: int = 0) -> list[tuple[list[int], int]]:
    """[(prompt ids, output length)]: lengths 100..1024, drawn in the order that other benchmarks of this kind have:
    every prompt, its length first, and then every output length."""
    draw = random.Random(seed).randint
    prompts = [[draw(0, 10000) for _ in range(draw(SHORTEST, LONGEST))] for _ in range(count)]
    return [(prompt, draw(SHORTEST, LONGEST)) for prompt in prompts]


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of one length."""
    rng = random.Random(seed)
    return [[rng.randint(0, 10000) for _ in range(length)] for _ in range(count)]


def params(max_tokens: int, **words: Any) -> Any:
    from framework import SamplingParams

    fixed = {"temperature": TEMPERATURE, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=max_tokens, **(fixed | words))


def generate(llm: Any, work: Sequence[tuple[list[int], int]], **words: Any) -> float:
    """Seconds until all outputs are there. RuntimeError when a request got another number of tokens, or no logprobs."""
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    asked = [params(length, **words) for _, length in work]
    start = time.perf_counter()
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output, (_, length) in zip(outputs, work, strict=True):
        one = output.outputs[0]
        if len(one.token_ids) != length:
            raise RuntimeError(f"a request got {len(one.token_ids)} tokens of {length}")
        if words.get("logprobs") and (one.logprobs is None or len(one.logprobs) != length):
            raise RuntimeError("a request got no logprobs")
    return seconds


# ------------------------------------------------------------------------------------------------------------ parts


def throughput(
    llm: Any, requests: Sequence[tuple[list[int], int]], reps: int, part: str, case: str, **words: Any
) -> list[Figure]:
    """Output tokens a second. A pass before the timed ones has the same prompts and outputs of 2, 3, 4, ... tokens, so
    that every size of batch has been there; its seconds are told."""
    first = generate(llm, [(ids, 2 + i) for i, (ids, _) in enumerate(requests)], **words)
    num_tokens = sum(length for _, length in requests)
    rates = [num_tokens / generate(llm, requests, **words) for _ in range(reps)]
    return [
        Figure(part, f"{case}: output tokens", "1/s", rates, is_rate=True),
        Figure(part, f"{case}: warm-up pass", "s", [first]),
    ]


def decode(llm: Any, batch: int, reps: int) -> list[Figure]:
    """Milliseconds between the steps in which all requests decode, and what the host does in one.

    In HOST_STEPS the device has finished before the host begins, so that its part holds no waiting.
    """
    gaps: list[float] = []
    host: list[dict[str, float]] = []
    for _ in range(reps):
        passed = decode_pass(llm, batch)
        gaps += passed[0]
        host += passed[1]
    figures = [Figure("b", f"decode step, batch {batch}", "ms", gaps)]
    figures.append(Figure("b", f"host, batch {batch}", "us", [one["whole"] for one in host]))
    names = dict.fromkeys(part for one in host for part in one if part != "whole")
    parts = {part: [one.get(part, 0.0) for one in host] for part in names}  # steps of a course have fewer parts
    return figures + [Figure("b", f"host, batch {batch}: {part}", "us", us) for part, us in parts.items()]


def decode_pass(llm: Any, batch: int) -> tuple[list[float], list[dict[str, float]]]:
    """(ms between steps, host us by part of a step) of one pass.

    RuntimeError when the prompts were still being computed: the figures would be of other steps.
    """
    engine, ends, host = llm.engine, list[float](), list[dict[str, float]]()
    seen = list[bool]()
    add_decodes(engine, batch)
    while engine.has_unfinished_requests():
        number = len(ends)
        if number in HOST_STEPS:
            wait_for_oldest(engine)
        start = time.perf_counter()
        engine.step()
        ends.append(time.perf_counter())
        step = engine.core.last_step
        seen.append(step.num_rows == batch and not step.num_prompt_tokens)
        if number in HOST_STEPS:
            host.append(host_us(ends[-1] - start, step.seconds))
    if not all(seen[HOST_STEPS.start : TIMED_STEPS.stop + 1]):
        raise RuntimeError(
            f"{batch} prompts of {DECODE_PROMPT} tokens are not computed, or not kept, by step {HOST_STEPS.start}: "
            "raise scheduler.max_num_batched_tokens, scheduler.max_num_seqs or kv_cache.num_blocks"
        )
    return [1e3 * (ends[i + 1] - ends[i]) for i in TIMED_STEPS], host


def add_decodes(engine: Any, batch: int) -> None:
    for i, ids in enumerate(prompts_of(batch, DECODE_PROMPT, 1)):
        engine.add_request(f"decode {i}", {"prompt_token_ids": ids}, params(DECODE_OUTPUT))


def wait_for_oldest(engine: Any) -> None:
    """Until the step that `engine.step()` would wait for has been done."""
    in_flight = engine.core._in_flight
    while in_flight and not in_flight[0].future.done():
        time.sleep(0)


def host_us(whole_s: float, seconds: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of a call of `engine.step()` that had nothing to wait for, by part. rest: what no part names.

    The parts are those of the step that came back in this call, which was told to the device in a call before it.
    """
    us = {part: 1e6 * seconds[part] for part in HOST_PARTS if part in seconds}
    whole = 1e6 * whole_s
    return {**us, "rest": whole - sum(us.values()), "whole": whole}


def long_prompt(llm: Any) -> list[Figure]:
    """Milliseconds to the token of one long prompt, another one each time."""
    prompts = prompts_of(LONG_RUNS, LONG_PROMPT, 100)
    ms = [1e3 * generate(llm, [(ids, 1)]) for ids in prompts]
    return [Figure("d", f"prompt of {LONG_PROMPT} tokens to its token", "ms", ms[LONG_WARM:])]


def invariance(llm: Any) -> list[Figure]:
    """How many of a request's tokens and best logits differ from those that it gets alone: sent again, and among others
    that come before and behind it, which cut its prompt into other chunks."""
    asked = (prompts_of(1, INVARIANT_PROMPT, 7)[0], 32)
    alone = company(llm, asked, 0)
    figures = []
    for others in COMPANIES:
        pairs = list(zip_longest(alone, company(llm, asked, others)))
        count = float(sum(x != y for x, y in pairs))
        figures.append(Figure("i", f"of {len(pairs)} logits and tokens, differing among {others}", "", [count]))
    return figures


def company(llm: Any, asked: tuple[list[int], int], others: int) -> list[tuple[int, float]]:
    """(token, logprob or logit) of every place and rank of a request, among so many others."""
    from framework import SamplingParams

    work = workload(others, seed=others) if others else []
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    words = [params(min(length, 200), seed=i) for i, (_, length) in enumerate(work)]
    at = others // 2
    prompts.insert(at, {"prompt_token_ids": asked[0]})
    words.insert(at, SamplingParams(max_tokens=asked[1], seed=5, ignore_eos=True, detokenize=False, logprobs=20))
    one = llm.generate(prompts, words, use_tqdm=False)[at].outputs[0]
    ranked = [(token, entry.logprob) for place in one.logprobs for token, entry in place.items()]
    return [*((token, 0.0) for token in one.token_ids), *ranked]


class DecodeRound:
    """`interfaces.Bench`, as far as `run.profile` asks: one round is a pass of decodes."""

    def __init__(self, batch: int) -> None:
        self.batch, self.num_steps = batch, 0

    def round(self, engine: Any, number: int, advance: Callable[[int], Any]) -> None:
        add_decodes(engine, self.batch)
        self.num_steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            self.num_steps += 1
            advance(0)


def profiled(llm: Any, batch: int, folder: Path, num_prompt_steps: int) -> list[Figure]:
    """What torch's profiler sees of a decode step: launches, copies and waits, busy time, kernels by kind."""
    from framework.runs.bench.profile import profile_round

    path = folder / f"trace-{batch}.json"
    bench: Any = DecodeRound(batch)
    seen = profile_round(str(path), bench, llm.engine, 0, lambda _: None, num_prompt_steps + DECODE_OUTPUT)
    figures = [Figure("p", f"batch {batch}: wall time, profiled", "us", [seen.wall_us])]
    if seen.busy_us is not None:
        figures.append(Figure("p", f"batch {batch}: device busy", "us", [seen.busy_us]))
    events = json.loads(path.read_text())["traceEvents"]
    kinds = kernels_by_kind(events, seen.num_steps)
    figures += [Figure("p", f"batch {batch}: kernels, {kind}", "us", [us]) for kind, us in kinds.items()]
    return figures + [Figure("p", f"batch {batch}: {what}", "a step", [count]) for what, count in seen.counts.items()]


def kernels_by_kind(events: Iterable[Mapping[str, Any]], num_steps: int) -> dict[str, float]:
    """{kind: us a step} of what the device does between the marks of `run.profile`; times of kernels that overlap
    count twice."""
    from framework.runs.bench.trace_figures import BEGIN, END

    timed = [event for event in events if event.get("ph") == "X"]
    start, end = (next(event["ts"] for event in timed if event["name"] == name) for name in (BEGIN, END))
    found: dict[str, float] = {}
    for event in timed:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and start <= event["ts"] < end:
            kind = next((kind for kind, names in KERNELS.items() if re.search(names, event["name"])), "other")
            found[kind] = found.get(kind, 0.0) + event["dur"] / num_steps
    return found


# ----------------------------------------------------------------------------------------------------------- floors


def with_floor(one: Figure, work: Work, ceilings: Ceilings, requests: Sequence[tuple[list[int], int]]) -> Figure:
    """The figure with its floor, where it has one."""
    floor = None
    if one.what.endswith("output tokens"):
        lengths = [(len(ids), length) for ids, length in requests]
        floor = sum(length for _, length in lengths) / work.workload_s(ceilings, lengths)
    elif one.what.startswith("decode step"):
        batch = int(one.what.rpartition(" ")[2])
        floor = 1e3 * work.decode_s(ceilings, batch, batch * CONTEXT)
    elif one.part == "d":
        floor = 1e3 * (work.prompt_s(ceilings, LONG_PROMPT) + work.head * work.itemsize / ceilings.copy_bytes_s)
    return replace(one, floor=floor)


def measure_ceilings(dtype: str) -> Ceilings:
    """What this device does at most, now."""
    return Ceilings(copy_bytes_s(), matmul_flop_s(dtype))


def copy_bytes_s(num_bytes: int = 512 << 20) -> float:
    """Of copies that are far larger than the cache; read and written bytes count."""
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(device_seconds(lambda: target.copy_(source), 1) for _ in range(20))


def matmul_flop_s(dtype: str, size: int = 8192) -> float:
    """Of products of square matrices, ten in a row: what the device keeps up when it is warm."""
    import torch

    x = torch.randn(size, size, device="cuda").to(getattr(torch, dtype))
    return 2 * size**3 / statistics.median(device_seconds(lambda: x @ x, 10) for _ in range(7))


def device_seconds(function: Callable[[], Any], count: int) -> float:
    """Seconds of one of `count` calls in a row, by the device's clock."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()
    start.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / count


# ----------------------------------------------------------------------------------------------------------- driver


def build(shape: str, folder: Path, words: Sequence[str]) -> tuple[Any, list[Figure]]:
    """The engine, and what its start-up took since this script began."""
    from framework import LLM

    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    llm = LLM(str(folder), overrides=[*FIXED, *words])
    total = time.perf_counter() - BEGIN
    parts = {key: llm.engine.facts["seconds"].get(key) for key in ("load", "compile", "capture")}
    seconds = {**{key: value for key, value in parts.items() if value is not None}, "total, with imports": total}
    return llm, [Figure("start-up", key, "s", [value]) for key, value in seconds.items()]


FIXED = (
    "backend=cuda", "sampler=gumbel", "engine.load_format=dummy", "engine.dtype=bfloat16", "engine.seed=0",
    f"engine.max_model_len={MAX_MODEL_LEN}", "scheduler.max_num_seqs=256", "kv_cache.prefix_caching=false",
)  # fmt: skip


def parts_of(llm: Any, args: argparse.Namespace, folder: Path) -> list[tuple[str, Callable[[], list[Figure]]]]:
    """[(part, what measures it)] of the parts that are asked for, in the order in which they run."""
    requests = workload()
    batches = [int(batch) for batch in args.batches.split(",")]
    prompt_steps = {batch: -(-batch * DECODE_PROMPT // 8192) for batch in batches}
    runs = [("a", partial(throughput, llm, requests, args.reps, "a", "temperature 0.6"))]
    runs += [("b", partial(decode, llm, batch, args.reps)) for batch in batches]
    runs += [("d", partial(long_prompt, llm))]
    runs += [("c", partial(throughput, llm, requests, args.reps, "c", case, **w)) for case, w in CASES.items()]
    runs += [("i", partial(invariance, llm))]
    ends = dict.fromkeys((batches[0], batches[-1]))
    runs += [("p", partial(profiled, llm, batch, folder, prompt_steps[batch])) for batch in ends]
    return [(part, run) for part, run in runs if part in args.parts]


def measure(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Adds every figure to the report. A part that fails is told of, and the others run."""
    import torch

    num_compiled = len(list(compiled_kernels().glob("*")))
    llm, startup = build(args.shape, folder, args.words)
    report.facts = {**facts_of(args.shape), "kernels in Triton's cache before": num_compiled}
    report.add(startup)
    facts, requests = llm.engine.facts, workload()
    work = Work.of(SHAPES[args.shape], getattr(torch, facts["dtype"]).itemsize)
    ceilings = measure_ceilings(facts["dtype"])
    report.facts["engine"] = {key: value for key, value in facts.items() if key not in ("seconds", "why_async")}
    report.facts["copy"] = f"{ceilings.copy_bytes_s / 1e12:.2f} TB/s"
    report.facts["product"] = f"{ceilings.matmul_flop_s / 1e12:.0f} TFLOP/s"
    for part, run in parts_of(llm, args, args.out or folder):
        try:
            abort_all(llm.engine)
            report.add(with_floor(one, work, ceilings, requests) for one in run())
        except Exception as error:
            traceback.print_exc()
            report.fail(part, error)
    report.facts["device after"] = device_state()
    report.save()
    llm.close()


def abort_all(engine: Any) -> None:
    """Ends what a part that failed has left."""
    for request_id in list(engine._states):
        engine.abort(request_id)


def facts_of(shape: str) -> dict[str, Any]:
    import torch
    import triton

    from framework.runs.bench.report import machine, versions

    return {
        "device": torch.cuda.get_device_name(), "device before": device_state(),
        "machine": ", ".join(machine().values()),
        "versions": {**versions(), "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(["python", *sys.argv]), "shape": shape,
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }  # fmt: skip


def compiled_kernels() -> Path:
    """Where Triton keeps compiled kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def device_state() -> str:
    """Driver, clocks, temperature and power, as nvidia-smi tells them."""
    what = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not told: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--parts", default=PARTS, help=f"letters of {PARTS + MORE_PARTS}; {PARTS} unless it is given")
    parser.add_argument("--reps", type=int, default=3, help="timed passes of the parts a, b and c")
    parser.add_argument(
        "--batches",
        default=",".join(map(str, BATCHES)),
        help="of part b, rising; the least and the most are those of part p",
    )
    parser.add_argument("--out", type=Path, help="folder for cuda-SHAPE.json, cuda-SHAPE.md and traces")
    parser.add_argument("words", nargs="*", help="words of the configuration, such as engine.graphs=off")
    args = parser.parse_intermixed_args()
    if unknown := set(args.parts) - set(PARTS + MORE_PARTS):
        parser.error(f"--parts {args.parts}: there is no part {min(unknown)}; the parts are {PARTS + MORE_PARTS}")
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/cuda.py: torch sees no CUDA device here, and nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    report = Report(f"cuda-{args.shape}", args.out)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        measure(report, args, Path(folder))
    print("\n".join(f"- {key}: {value}" for key, value in report.facts.items()))
    if report.errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
