"""The sampler against one read of the logits and against peers, interleaved in one run, medians with their spread.

    python benchmarks/sampler.py --out FOLDER             # on a CUDA device: kernels, torch, FlashInfer, vLLM if there
    python benchmarks/sampler.py --quick                  # one vocabulary, batches 1 and 256, few repetitions
    python benchmarks/sampler.py --tune                   # ways to split the work of our kernels
    python benchmarks/sampler.py --device cpu             # the stages in torch, as a share of the engine's decode step

On a device each candidate is captured in a CUDA graph where that is possible (`eager` says where it is not), the L2 is
overwritten before each run, and all candidates of a case take turns. Times are of CUDA events around a replay, and
`read` is a kernel that only reads the logits, measured alike: what a single pass costs here. Peers get float32 logits
that are converted beforehand, ours the model's bfloat16. `--out` gets sampler.json and sampler.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU needs none
    triton = None

BATCHES, VOCABS = (1, 8, 64, 256), (128256, 151936)
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 50, 0.9, 0.05
LOGPROBS = (0, 5, 20)
CPU_ROWS, CPU_STEPS, PROMPT = 32, 24, 136
CPU_SHARE = 0.05
"""Of a decode step, what the whole sampler may take of it."""


@dataclass
class Inputs:
    """What every candidate of a shape works on. scaled: float32 logits over the temperature, for peers."""

    logits: Tensor
    scaled: Tensor
    counts: Tensor
    words: Tensor
    ids: Tensor

    @property
    def rows(self) -> int:
        return self.logits.shape[0]


def make_inputs(batch: int, vocab: int, device: str, spread: float | None) -> Inputs:
    """Logits as a real model's: a normal body and 200 tokens a row whose probabilities fall like rank^-1.5.

    spread  of a normal distribution instead: a row without peaks, where thresholds have most to do
    """
    g = torch.Generator(device=device).manual_seed(batch + vocab)
    body = torch.randn(batch, vocab, generator=g, device=device)
    if spread is None:
        rank = torch.arange(1, 201, device=device, dtype=torch.float32)
        peaks = 20.0 - 1.5 * rank.log() + torch.rand(batch, 200, generator=g, device=device)
        where = torch.randint(0, vocab, (batch, 200), generator=g, device=device)
        body = (body * 2.0).scatter_(1, where, peaks)
    else:
        body *= spread
    logits = body.to(torch.bfloat16)
    counts = (torch.rand(batch, vocab, generator=g, device=device) < 0.002).int()
    words = torch.randint(-(2**31), 2**31 - 1, (batch, -(-vocab // 32)), generator=g, device=device).int()
    return Inputs(logits, logits.float() / TEMPERATURE, counts, words, logits.argmax(-1))


# ------------------------------------------------------------------------------------------------------- candidates


def ours(case: str, x: Inputs, **split: Any) -> Callable[[], Any]:
    """The case through `SamplerOps`, with the operands that the stages give. split: words of TritonSamplerOps."""
    from framework_backends.triton.sampler_ops import TritonSamplerOps

    ops, rows, device = TritonSamplerOps(**split), rows_of(x), x.logits.device
    if case.startswith("logprobs"):
        return lambda: ops.logprobs(x.logits, x.ids, int(case.split()[1]), is_log=True)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((x.rows,), value, dtype=dtype, device=device)

    place = torch.arange(x.rows, dtype=torch.int32, device=device)
    seen = torch.cat([torch.zeros_like(x.counts[:1]), x.counts])  # place 0 is nobody's
    steps = {
        "penalties": {
            "repetition": column(1.2), "frequency": column(0.3), "presence": column(0.2), "seen": seen,
            "place": place + 1,
        },
        "grammar": {"words": x.words, "logits_rows": None},
        "temperature": {"factor": column(1 / TEMPERATURE)},
        "min-p": {"log_min_p": column(MIN_P).log()},
        "top-k": {"k": column(TOP_K, torch.int32)},
        "top-p": {"top_p": column(TOP_P)},
    }  # fmt: skip
    names = {"grammar": "bitmask", "temperature": "scale", "min-p": "min_p", "top-k": "top_k", "top-p": "top_p"}
    used = [name for name in steps if name in case or (name == "temperature" and case != "greedy")]
    chain = sorted(((names.get(n, n), steps[n]) for n in used), key=lambda link: ops.fuses.index(link[0]))
    select = ("argmax", {}) if case == "greedy" else ("draw", {"draws": column(1, torch.int32)})
    return lambda: ops.sample(x.logits, rows, [*chain, select], None)


def rows_of(x: Inputs) -> Any:
    from framework.batch import Rows

    count, device = x.rows, x.logits.device
    return Rows(
        req_idx=torch.arange(count, device=device),
        offset=torch.zeros(count, dtype=torch.int32, device=device),
        position=torch.arange(count, device=device) + 100,
        seed=torch.arange(count, device=device) * 7919 + 1,
        drafts=torch.zeros(count, 0, dtype=torch.int64, device=device),
        num_drafts=torch.zeros(count, dtype=torch.int32, device=device),
        req_idx_np=torch.arange(count, dtype=torch.int32).numpy(),
    )


def pick(probs: Tensor) -> Tensor:
    return torch.multinomial(probs, 1)


def torch_top_p(x: Tensor) -> Tensor:
    """The textbook way: sort, cut where the mass is reached, draw, look the id up."""
    values, ids = x.sort(-1, descending=True)
    probs = values.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= TOP_P, 0.0)
    return ids.gather(1, pick(probs))


def torch_top_k(x: Tensor, p: float = 1.0) -> Tensor:
    values, ids = x.topk(TOP_K, -1)
    probs = values.softmax(-1)
    if p < 1:
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= p, 0.0)
    return ids.gather(1, pick(probs))


def torch_min_p(x: Tensor) -> Tensor:
    probs = x.softmax(-1)
    return pick(probs.masked_fill(probs < MIN_P * probs.amax(-1, keepdim=True), 0.0))


def torch_penalties(x: Inputs) -> Tensor:
    logits = x.logits.float()
    seen = x.counts > 0
    logits = torch.where(seen, torch.where(logits > 0, logits / 1.2, logits * 1.2), logits)
    logits = logits - (0.3 * x.counts + 0.2 * seen)
    return pick((logits / TEMPERATURE).softmax(-1))


def torch_grammar(x: Inputs) -> Tensor:
    bits = (x.words.unsqueeze(-1) >> torch.arange(32, device=x.words.device)) & 1
    masked = x.scaled.masked_fill(bits.flatten(1)[:, : x.scaled.shape[1]] == 0, -torch.inf)
    return pick(masked.softmax(-1))


def torch_logprobs(x: Inputs, k: int) -> Any:
    logprobs = x.logits.float().log_softmax(-1)
    own = logprobs.gather(1, x.ids.unsqueeze(1))
    return logprobs.topk(max(k, 1), -1), own, (logprobs > own).sum(-1)


def in_torch(case: str, x: Inputs) -> Callable[[], Any]:
    if case.startswith("logprobs"):
        return lambda: torch_logprobs(x, int(case.split()[1]))
    by_case: dict[str, Callable[[], Any]] = {
        "greedy": lambda: x.logits.argmax(-1),
        "temperature": lambda: pick((x.logits.float() / TEMPERATURE).softmax(-1)),
        "top-k": lambda: torch_top_k(x.scaled),
        "top-p": lambda: torch_top_p(x.scaled),
        "top-k top-p": lambda: torch_top_k(x.scaled, TOP_P),
        "min-p": lambda: torch_min_p(x.scaled),
        "penalties": lambda: torch_penalties(x),
        "grammar": lambda: torch_grammar(x),
    }
    return by_case[case]


def in_flashinfer(case: str, x: Inputs) -> Callable[[], Any] | None:
    import flashinfer.sampling as fs

    k = torch.full((x.rows,), TOP_K, dtype=torch.int32, device=x.logits.device)
    p = torch.full((x.rows,), TOP_P, device=x.logits.device)
    both = fs.top_k_top_p_sampling_from_logits
    by_case: dict[str, Callable[[], Any]] = {
        "temperature": lambda: fs.sampling_from_logits(x.scaled),
        "top-k": lambda: fs.top_k_sampling_from_probs(x.scaled.softmax(-1), k),
        "top-p": lambda: fs.top_p_sampling_from_probs(x.scaled.softmax(-1), p),
        "top-k top-p": lambda: both(x.scaled, k, p, deterministic=True),
        "min-p": lambda: fs.min_p_sampling_from_probs(x.scaled.softmax(-1), torch.full_like(p, MIN_P)),
    }
    return by_case.get(case)


def in_vllm(case: str, x: Inputs) -> Callable[[], Any] | None:
    """Its Triton mask for top-k and top-p with its exponential race; its gather of logprobs."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton as mask

    k = torch.full((x.rows,), TOP_K, dtype=torch.int32, device=x.logits.device)
    p = torch.full((x.rows,), TOP_P, device=x.logits.device)

    def race(logits: Tensor) -> Tensor:
        probs = logits.softmax(-1)
        return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1)

    by_case: dict[str, Callable[[], Any]] = {
        "temperature": lambda: race(x.logits.float() / TEMPERATURE),
        "top-k": lambda: race(mask(x.scaled.clone(), k, None)),
        "top-p": lambda: race(mask(x.scaled.clone(), None, p)),
        "top-k top-p": lambda: race(mask(x.scaled.clone(), k, p)),
    }
    return by_case.get(case)


CASES = (
    "greedy", "temperature", "top-k", "top-p", "top-k top-p", "min-p", "penalties", "grammar",
    *(f"logprobs {k}" for k in LOGPROBS),
)  # fmt: skip
PASSES = {"top-k": "1 + groups above the cut", "top-p": "1 + groups above the cut", "min-p": "1 + kept groups"}
PASSES["top-k top-p"] = PASSES["top-k"]
"""How often ours reads the logits; 1 for all others. Flat rows are read a few times more, see `settle`."""
TARGETS = {  # us at batch 256 and vocabulary 151936: (must, aim)
    "greedy": (35, 25), "temperature": (55, 40), "top-k": (200, 110), "top-p": (200, 110), "top-k top-p": (200, 110),
    "logprobs 20": (110, 70),
}  # fmt: skip


if triton is not None:

    @triton.jit
    def read_kernel(logits, step, vocab, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Grid (blocks, L): out [L, blocks] float32 sums."""
        row = tl.program_id(1)
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * step + ids, mask=ids < vocab, other=0.0).to(tl.float32)
        tl.store(out + row * tl.num_programs(0) + tl.program_id(0), tl.sum(x))


def reader(x: Inputs) -> Callable[[], Any]:
    """One read of the logits in their own dtype and nothing else."""
    blocks = triton.cdiv(x.logits.shape[1], 4096)
    out = torch.empty(x.rows, blocks, device=x.logits.device)
    args = (x.logits, x.logits.stride(0), x.logits.shape[1], out)
    return lambda: read_kernel[(blocks, x.rows)](*args, BLOCK=4096)


# ----------------------------------------------------------------------------------------------------------- timing


@dataclass
class Candidate:
    name: str
    run: Callable[[], Any]
    is_captured: bool = False
    error: str = ""
    times_us: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times_us)

    def record(self) -> dict[str, Any]:
        if self.error:
            return {"error": self.error}
        tenths = statistics.quantiles(self.times_us, n=10)
        return {
            "us": round(self.median, 1), "p10": round(tenths[0], 1), "p90": round(tenths[-1], 1),
            "captured": self.is_captured,
        }  # fmt: skip


def prepare(name: str, make: Callable[[], Callable[[], Any] | None]) -> Candidate | None:
    """Compiled, warm and captured; None for a case that it does not serve, or a library that is not there."""
    try:
        run = make()
    except ImportError:
        return None
    if run is None:
        return None
    try:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    except Exception as error:
        return Candidate(name, run, error=" ".join(repr(error).split())[:200])
    return capture(name, run)


def capture(name: str, run: Callable[[], Any]) -> Candidate:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = run()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:  # a candidate that waits for the device is timed as its users run it
        torch.cuda.synchronize()
        return Candidate(name, run)
    kept = run, kept  # a graph replays over the memory of what was captured
    return Candidate(name, lambda graph=graph, kept=kept: graph.replay(), is_captured=True)  # type: ignore[misc]


def measure(candidates: Iterable[Candidate], reps: int) -> None:
    """All candidates in turn, `reps` times, with the L2 overwritten before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    good = [c for c in candidates if not c.error]
    for _ in range(reps):
        events = []
        for one in good:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            one.run()
            end.record()
            events.append((one, start, end))
        torch.cuda.synchronize()
        for one, start, end in events:
            one.times_us.append(start.elapsed_time(end) * 1e3)


def shape(batch: int, vocab: int, cases: Iterable[str], reps: int, peers: bool, spread: float | None) -> list[Any]:
    x = make_inputs(batch, vocab, "cuda", spread)
    read = prepare("read", lambda: reader(x))
    rows = []
    for case in cases:
        makers = {"ours": lambda case=case: ours(case, x)}
        if peers:
            makers |= {
                "torch": lambda case=case: in_torch(case, x),
                "flashinfer": lambda case=case: in_flashinfer(case, x),
                "vllm": lambda case=case: in_vllm(case, x),
            }  # fmt: skip
        found = {name: prepare(name, make) for name, make in makers.items()}
        candidates = {name: one for name, one in found.items() if one is not None}
        assert read is not None
        read.times_us = []
        measure([read, *candidates.values()], reps)
        row = {
            "batch": batch,
            "vocab": vocab,
            "case": case,
            "logits": "peaked" if spread is None else f"N(0, {spread})",
        }
        row |= {"passes": PASSES.get(case, "1"), "read": read.record()}
        row |= {name: one.record() for name, one in candidates.items()}
        if not candidates["ours"].error:
            row["ratio"] = round(candidates["ours"].median / read.median, 2)
        rows.append(row)
        print("ROW", json.dumps(row), flush=True)
        del candidates, found
    torch.cuda.empty_cache()
    return rows


SPLITS = tuple(
    {"block_groups": groups, "num_warps": warps, "row_warps": row_warps, "loops": loops, "goes_on": goes_on}
    for groups, warps, row_warps, loops, goes_on in (
        (32, 4, 8, 1, True), (32, 4, 8, 2, True), (32, 4, 8, 4, True), (64, 8, 8, 1, True), (64, 4, 8, 1, True),
        (16, 4, 8, 4, True), (32, 4, 8, 1, False), (64, 8, 8, 1, False), (32, 4, 4, 1, False), (32, 4, 16, 1, False),
    )
)  # fmt: skip
"""Ways to split the work among programs, for `--tune`."""


def tune(reps: int) -> list[Any]:
    """Each way to split the work against the others, at the vocabulary of the targets."""
    rows = []
    for batch in (1, 32, 256):
        x = make_inputs(batch, VOCABS[-1], "cuda", None)
        for case in ("greedy", "temperature", "top-k top-p", "logprobs 20"):
            tried = {}
            for split in SPLITS:
                name = "{block_groups}/{num_warps}/{row_warps}/{loops}/{goes_on}".format(**split)
                made = prepare(name, lambda x=x, case=case, split=split: ours(case, x, **split))
                assert made is not None
                tried[name] = made
            measure(tried.values(), reps)
            rows.append({"batch": batch, "vocab": VOCABS[-1], "case": case})
            rows[-1] |= {"splits": {name: one.record() for name, one in tried.items()}}
            print("ROW", json.dumps(rows[-1]), flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------- the CPU


def on_cpu(cases: Iterable[str]) -> list[Any]:
    """Each case as the engine runs it for 32 requests of the default model: the sampler's part of a decode step."""
    from framework import LLM, SamplingParams
    from framework.cli import prepare_environment

    prepare_environment("cpu")
    words = {
        "greedy": {"temperature": 0.0}, "temperature": {}, "top-k": {"top_k": TOP_K}, "top-p": {"top_p": TOP_P},
        "top-k top-p": {"top_k": TOP_K, "top_p": TOP_P}, "min-p": {"min_p": MIN_P},
        "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        "grammar": {"structured_outputs": {"regex": "[a-z ]{200}"}, "ignore_eos": False},
        **{f"logprobs {k}": {"logprobs": k} for k in LOGPROBS},
    }  # fmt: skip
    rows = []
    limits = [f"scheduler.max_num_seqs={CPU_ROWS}", "engine.max_model_len=256", "kv_cache.num_blocks=400"]
    with LLM(overrides=["backend=cpu", *limits]) as llm:
        for case, given in ((case, words[case]) for case in cases if case in words):
            params = SamplingParams(**{"max_tokens": CPU_STEPS, "ignore_eos": True, "temperature": TEMPERATURE} | given)
            sample, whole = zip(*decode_steps(llm.engine, params), strict=True)
            us, step = 1e6 * statistics.median(sample), 1e6 * statistics.median(whole)
            row = {"batch": CPU_ROWS, "vocab": llm.engine.admission.limits.vocab_size, "case": case}
            rows.append(row | {"ours": {"us": round(us, 1)}, "step_us": round(step, 1), "share": round(us / step, 4)})
            print("ROW", json.dumps(rows[-1]), flush=True)
    return rows


def decode_steps(engine: Any, params: Any) -> list[tuple[float, float]]:
    """(seconds of the sampler, of the whole step) of each step in which all requests decode.

    Their prompts are as long as the mean one of the workload of benchmarks/cpu.py, so that a step is one of that.
    """
    found = []
    for i in range(CPU_ROWS):
        engine.add_request(str(i), {"prompt_token_ids": list(range(20 + i, 20 + PROMPT + i))}, params)
    while engine.has_unfinished_requests():
        engine.step()
        step = engine.core.last_step
        if step.num_rows == CPU_ROWS and not step.num_prompt_tokens:
            found.append((step.seconds["sample"], sum(step.seconds.values())))
    return found


# ----------------------------------------------------------------------------------------------------------- report


def machine(device: str) -> dict[str, Any]:
    facts = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if device == "cuda":
        facts |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        for name in ("triton", "flashinfer", "vllm"):
            try:
                facts[name] = __import__(name).__version__
            except ImportError:
                facts[name] = "not there"
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def table(rows: list[Any]) -> str:
    """One line a case, candidates side by side: median (p10 to p90) in us, `eager` for what could not be captured."""
    if any("splits" in row for row in rows):
        return tuned(rows)
    names = [n for n in ("read", "ours", "torch", "flashinfer", "vllm") if any(n in row for row in rows)]
    extra = ["passes", "ratio"] if "read" in names else ["step_us", "share"]
    head = ["batch", "vocab", "logits", "case", *names, *extra, "must / aim"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        is_target = (row["batch"], row["vocab"], row.get("logits")) == (256, 151936, "peaked")
        target = "{} / {}".format(*TARGETS[row["case"]]) if is_target and row["case"] in TARGETS else ""
        if "share" in row:
            target = f"{CPU_SHARE} {'held' if row['share'] < CPU_SHARE else 'missed'}"
        cells = [str(row.get(n, "")) for n in ("batch", "vocab", "logits", "case")]
        cells += [cell(row.get(n)) for n in names] + [str(row.get(n, "")) for n in extra] + [target]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tuned(rows: list[Any]) -> str:
    """Groups to a block / warps / warps of a row / blocks to a program / goes on, best first."""
    lines = []
    for row in rows:
        good = {name: one for name, one in row["splits"].items() if "us" in one}
        best = sorted(good, key=lambda name: good[name]["us"])
        lines.append(f"- {row['batch']} {row['case']}: " + ", ".join(f"{name} {good[name]['us']}" for name in best))
    return "\n".join(lines)


def cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    if "error" in record:
        return f"failed: {record['error'][:60]}"
    spread = f" ({record['p10']} to {record['p90']})" if "p10" in record else ""
    return f"{record['us']}{spread}" + ("" if record.get("captured", True) else " eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for sampler.json and sampler.md")
    parser.add_argument("--quick", action="store_true", help="vocabulary 151936, batches 1 and 256, few repetitions")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--tune", action="store_true", help="ways to split the work instead of cases against peers")
    given = parser.parse_args()
    facts = machine(given.device) | {"command": " ".join(["python", *sys.argv])}
    print(json.dumps(facts), flush=True)
    start = time.perf_counter()
    rows = on_cpu(given.cases) if given.device == "cpu" else on_cuda(given)
    facts["seconds"] = round(time.perf_counter() - start, 1)
    report = "\n".join(f"- {key}: {value}" for key, value in facts.items()) + "\n\n" + table(rows) + "\n"
    print(report)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "sampler.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
        (given.out / "sampler.md").write_text(report)


def on_cuda(given: argparse.Namespace) -> list[Any]:
    if given.tune:
        return tune(40)
    reps, batches, vocabs = (20, (1, 256), VOCABS[-1:]) if given.quick else (60, BATCHES, VOCABS)
    rows = []
    for vocab in vocabs:
        for batch in batches:
            rows += shape(batch, vocab, given.cases, reps, not given.no_peers, None)
    flat = [case for case in given.cases if case in ("top-k", "top-p", "top-k top-p")]
    for spread in (2.5, 0.5):
        peers = not given.no_peers and spread == 2.5
        rows += shape(batches[-1], vocabs[-1], flat, reps // 2, peers, spread)
    return rows


if __name__ == "__main__":
    main()
