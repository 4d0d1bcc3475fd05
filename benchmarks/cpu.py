"""The CPU engine against the machine's floor and against peers, interleaved in one run, medians with their spread.

    python benchmarks/cpu.py                              # ours and the floor
    python benchmarks/cpu.py --peers peers.json           # with peers: [{"name": ..., "cmd": [...], "env": {...}}]

Every measurement is a process of its own that prints `RESULT {json}`; a peer's command may print the same record
(out_tok_s, startup_s, maxrss_mb, ...) for the same workload. `--part NAME` runs one of ours alone:
throughput, batch1, floor, overhead, invariant, startup.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MAX_MODEL_LEN = 512


def workload(n: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """[(prompt ids, output length)]: prompts of 16..256 ordinary ids, outputs of 16..128 tokens, uniform."""
    rng = random.Random(seed)
    lengths = [(rng.randint(16, 256), rng.randint(16, 128)) for _ in range(n)]
    return [([rng.randrange(20, 49152) for _ in range(prompt)], output) for prompt, output in lengths]


def make_llm(dtype: str, *words: str) -> Any:
    """The engine as a user gets it, with the workload's limits and without prefix hits."""
    from framework.cli import prepare_environment

    prepare_environment("cpu")
    from framework import LLM

    fixed = [
        "backend=cpu",
        f"engine.dtype={dtype}",
        f"engine.max_model_len={MAX_MODEL_LEN}",
        "scheduler.max_num_seqs=64",
    ]
    return LLM(overrides=[*fixed, "kv_cache.num_blocks=1200", "kv_cache.prefix_caching=false", *words])


def greedy(length: int) -> Any:
    from framework import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)


def run_workload(llm: Any, n: int) -> tuple[float, int, list[Any]]:
    """(seconds, output tokens, outputs) of one pass."""
    work = workload(n)
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    params = [greedy(length) for _, length in work]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, sum(len(o.outputs[0].token_ids) for o in outputs), outputs


def warm(llm: Any) -> None:
    llm.generate([{"prompt_token_ids": list(range(20, 36))}], greedy(4), use_tqdm=False)


# ------------------------------------------------------------------------------------------------------------ parts


def throughput(n: int, dtype: str, *words: str) -> dict[str, Any]:
    """Output tokens a second of n requests that arrive at once."""
    begin = time.perf_counter()
    llm = make_llm(dtype, *words)
    warm(llm)
    startup = time.perf_counter() - begin
    cpu = time.process_time()
    seconds, tokens, outputs = run_workload(llm, n)
    cpu = time.process_time() - cpu
    metrics = [o.metrics for o in outputs]
    return {
        "out_tok_s": tokens / seconds,
        "out_tok": tokens,
        "ttft_mean_s": statistics.mean(m.ttft for m in metrics),
        "tpot_mean_s": statistics.mean(m.tpot for m in metrics),
        "cpu_ms_per_out_tok": 1e3 * cpu / tokens,
        "startup_s": startup,
        "maxrss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def batch1(dtype: str) -> dict[str, Any]:
    """Median decode step of one request, and the bytes of weights that it reads."""
    llm = make_llm(dtype)
    warm(llm)
    prompt = workload(1)[0][0][:64]
    steps = []
    for _ in range(3):
        output = llm.generate([{"prompt_token_ids": prompt}], greedy(64), use_tqdm=False)[0]
        steps += output.metrics.itl[4:]
    return {"step_ms": 1e3 * statistics.median(steps), "weights_mb": bytes_of_weights(llm, dtype) / 1e6}


def bytes_of_weights(llm: Any, dtype: str) -> int:
    """Bytes of the matrices that a decode step reads, from the model's header; the tied head is the embedding."""
    from framework.checkpoint import open_checkpoint
    from framework.plugins import registry

    c = open_checkpoint(llm.engine.config.model, "auto", registry())[0].config
    hidden, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * c["intermediate_size"]
    return (c["num_hidden_layers"] * layer + c["vocab_size"] * hidden) * (4 if dtype == "float32" else 2)


def _timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def floor() -> dict[str, Any]:
    """Limits of the machine in a plain torch process: bytes read a second, products a second."""
    import torch

    data, a = torch.ones(64 << 20), torch.randn(2048, 2048)
    result = {"read_gb_s": data.numel() * 4 / min(_timed(data.sum) for _ in range(7)) / 1e9}
    for dtype in (torch.float32, torch.bfloat16):
        x = a.to(dtype)
        seconds = min(_timed(lambda x=x: x @ x) for _ in range(5))
        result[f"gemm_{str(dtype)[6:]}_gflop_s"] = 2 * 2048**3 / seconds / 1e9
    return result


def overhead(n: int, dtype: str) -> dict[str, Any]:
    """Microseconds a decode step outside forward and sampler, by part, at n running requests.

    hot_us, after_spin_us, after_stream_us: the sum when nothing stands in the place of the forward pass, a loop of
    10 ms that touches no memory, and a read of 280 MB. They tell what of the sum is work, and what is caches and
    branch predictors that have forgotten the host's code.
    """
    import torch

    llm = make_llm(dtype)
    warm(llm)
    samples = decode_seconds(llm, n)
    result = {f"{part}_us": 1e6 * statistics.median(s[part] for s in samples) for part in samples[0]}
    result["overhead_us"] = sum_of_overhead(samples)
    runner, vocab = llm.engine.core.executor._runner, llm.engine.admission.limits.vocab_size
    logits, data = torch.randn(n, vocab).to(getattr(torch, dtype)), torch.ones(70_000_000)
    for name, stand_in in {"hot": lambda: None, "after_spin": lambda: spin(0.01), "after_stream": data.sum}.items():
        runner.model = StandIn(stand_in, logits)
        result[f"{name}_us"] = sum_of_overhead(decode_seconds(llm, n))
    return result


class StandIn:
    """In the place of a model: its forward pass is `run`, and every row has the same logits [L, V] in each step."""

    def __init__(self, run: Callable[[], Any], logits: Any) -> None:
        self._run, self._logits = run, logits

    def embed(self, input_ids: Any) -> Any:
        return input_ids

    def forward(self, embeds: Any, positions: Any, ctx: Any) -> Any:
        self._run()
        return SimpleNamespace(hidden=positions.unsqueeze(1))

    def compute_logits(self, hidden: Any) -> Any:
        return self._logits[: len(hidden)]


def decode_seconds(llm: Any, n: int) -> list[dict[str, float]]:
    """Seconds by part of each step in which n requests decode."""
    engine, samples = llm.engine, []
    for i in range(n):
        engine.add_request(str(i), {"prompt_token_ids": list(range(20, 60))}, greedy(200))
    while engine.has_unfinished_requests():
        engine.step()
        if engine.core.last_step.num_tokens == n:
            samples.append(dict(engine.core.last_step.seconds))
    return samples


def sum_of_overhead(samples: list[dict[str, float]]) -> float:
    from framework.engine.stats import OVERHEAD_PARTS

    return 1e6 * statistics.median(sum(s[p] for p in OVERHEAD_PARTS) for s in samples)


def spin(seconds: float) -> None:
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        pass


def invariant(n: int, dtype: str) -> dict[str, Any]:
    """Output tokens a second with and without engine.batch_invariant, alternating in one process."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    engines = {flag: make_llm(dtype, f"engine.batch_invariant={str(flag).lower()}") for flag in rates}
    for llm in engines.values():
        warm(llm)
    for _ in range(2):
        for flag, llm in engines.items():
            seconds, tokens, _ = run_workload(llm, n)
            rates[flag].append(tokens / seconds)
    plain, fixed = (statistics.median(rates[flag]) for flag in (False, True))
    return {"plain_tok_s": plain, "invariant_tok_s": fixed, "cost": 1 - fixed / plain}


def startup() -> dict[str, Any]:
    """Seconds from process start to the first token of the default command, and of `LLM()` once torch is imported."""
    command = [sys.executable, "-m", "framework", "backend=cpu", "prompt=The capital of France is"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        seen = b""
        while len(seen) <= len(b"The capital of France is") and (byte := process.stdout.read(1)):
            seen += byte
        first = time.perf_counter() - start
        process.stdout.read()
    code = (
        "import time, torch; t = time.perf_counter(); from framework import LLM; LLM(overrides=['backend=cpu']);"
        "print(time.perf_counter() - t)"
    )
    built = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    return {"first_token_s": first, "llm_s": built}


# ----------------------------------------------------------------------------------------------------------- driver


def part(name: str, n: int, dtype: str) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "throughput": lambda: throughput(n, dtype),
        "batch1": lambda: batch1(dtype),
        "floor": floor,
        "overhead": lambda: overhead(n, dtype),
        "invariant": lambda: invariant(n, dtype),
        "startup": startup,
    }
    return parts[name]()


def ours(dtype: str) -> list[dict[str, Any]]:
    """Our measurements, in the form of a peers file."""
    me = [sys.executable, str(Path(__file__).resolve()), "--dtype", dtype, "--part"]
    return [
        {"name": "floor", "cmd": [*me, "floor"]},
        {"name": "floor, huge pages", "cmd": [*me, "floor"], "env": {"THP_MEM_ALLOC_ENABLE": "1"}},
        {"name": "ours n=16", "cmd": [*me, "throughput", "-n", "16"]},
        {"name": "ours n=32", "cmd": [*me, "throughput", "-n", "32"]},
        {"name": "ours batch 1", "cmd": [*me, "batch1"]},
        {"name": "ours overhead at 32", "cmd": [*me, "overhead", "-n", "32"]},
        {"name": "ours start-up", "cmd": [*me, "startup"]},
        {"name": f"ours invariant {dtype}", "cmd": [*me, "invariant", "-n", "16"]},
        {"name": "ours invariant float32", "cmd": [*me[:-2], "float32", "--part", "invariant", "-n", "16"]},
    ]


def measure(entry: dict[str, Any], cwd: Path, timeout_s: float) -> dict[str, Any] | None:
    """The record that a command prints, None with its last words on stderr when it prints none."""
    command = [os.path.expandvars(word) for word in entry["cmd"]]
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **entry.get("env", {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        print(f"{entry['name']}: no result within {timeout_s:.0f} s", file=sys.stderr)
        return None
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{entry['name']}: failed: {done.stderr.strip()[-400:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


Results = dict[str, dict[int, dict[str, Any]]]
"""{measurement: {round: record}}; a round that failed is not there."""


def drive(entries: list[tuple[dict[str, Any], Path]], rounds: int, timeout_s: float) -> Results:
    """Every measurement once a round, in turn, so that a drift of the machine meets all of them alike."""
    results: Results = {entry["name"]: {} for entry, _ in entries}
    for number in range(1, rounds + 1):
        for entry, cwd in entries:
            record = measure(entry, cwd, timeout_s)
            if record is not None:
                results[entry["name"]][number] = record
                shown = {k: round(v, 2) for k, v in record.items() if isinstance(v, float)}
                print(f"round {number} {entry['name']}: {shown}", file=sys.stderr, flush=True)
    return results


def report(results: Results) -> str:
    """Markdown: the machine, every figure as median, min and max, and throughput ratios to each peer by round."""
    lines = [f"{machine()}; command: `{' '.join(sys.argv)}`", "", "| what | figure | median | min | max | rounds |"]
    lines.append("|---|---|---|---|---|---|")
    for name, rounds in results.items():
        records = list(rounds.values())
        for key in records[0] if records else ():
            values = [r[key] for r in records if isinstance(r.get(key), int | float) and not isinstance(r[key], bool)]
            if values:
                figures = f"{statistics.median(values):.4g} | {min(values):.4g} | {max(values):.4g}"
                lines.append(f"| {name} | {key} | {figures} | {len(values)} |")
    lines += ["", "| batch-1 step / reading the weights once | median | min | max |", "|---|---|---|---|"]
    for name in ("floor", "floor, huge pages"):
        steps, limits = results.get("ours batch 1", {}), results.get(name, {})
        both = steps.keys() & limits.keys()
        ratios = [steps[r]["step_ms"] * limits[r]["read_gb_s"] / steps[r]["weights_mb"] for r in both]
        if ratios:
            figures = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f}"
            lines.append(f"| {name} | {figures} |")
    lines += ["", "| ours / peer, out_tok_s | median | min | max |", "|---|---|---|---|"]
    for mine in (name for name in results if name.startswith("ours n=")):
        count = mine.rpartition("=")[2]
        for peer, theirs in results.items():
            if not peer.startswith("ours") and peer.endswith(f"n={count}"):
                both = results[mine].keys() & theirs.keys()
                ratios = [results[mine][r]["out_tok_s"] / theirs[r]["out_tok_s"] for r in both]
                if ratios:
                    figures = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f}"
                    lines.append(f"| {mine} / {peer} | {figures} |")
    return "\n".join(lines)


def machine() -> str:
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    cores = len(os.sched_getaffinity(0))
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{when}, {model}, {cores} cores, load {os.getloadavg()[0]:.2f}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["throughput", "batch1", "floor", "overhead", "invariant", "startup"])
    parser.add_argument("-n", type=int, default=32, help="requests")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--peers", type=Path, help="JSON list of peers; names end with n=16 or n=32 to be compared")
    parser.add_argument("--only", default="", help="run measurements whose names contain one of these, comma separated")
    parser.add_argument("--out", type=Path, help="write the report here as well")
    args = parser.parse_args()
    if args.part:
        print("RESULT " + json.dumps(part(args.part, args.n, args.dtype)), flush=True)
        return
    entries = [(entry, Path.cwd()) for entry in ours(args.dtype)]
    if args.peers:
        entries += [(entry, args.peers.resolve().parent) for entry in json.loads(args.peers.read_text())]
    words = args.only.split(",")
    results = drive([e for e in entries if any(w in e[0]["name"] for w in words)], args.rounds, args.timeout)
    text = report(results)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    missing = sum(args.rounds - len(rounds) for rounds in results.values())
    if missing:
        raise SystemExit(f"{missing} measurements failed")


if __name__ == "__main__":
    main()
