"""What structured output costs: tokens/s of the default model at 0, 50 and 100 % structured requests, both grammars.

    python benchmarks/structured.py [--rounds 1] [--requests 16] [--async] [--seen FILE]

One engine a grammar in one process; rounds go through all of them in turn, so that what else the machine does meets
each alike. With `--seen` results are added to a file, and the table is of all that it holds: a long measurement in
short pieces. Median and extremes; masks are filled while a step is scheduled, and applied while it samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

_POINT = {
    "type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "integer"}}, "required": ["x", "y"],
    "additionalProperties": False,
}  # fmt: skip
_RECORD = {
    "name": {"type": "string", "maxLength": 20},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    "point": _POINT,
}
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": _RECORD, "required": list(_RECORD), "additionalProperties": False},
    "minItems": 50,
}
OUTPUT = 48
SHARES = (0.0, 0.5, 1.0)


def params(index: int, share: float, requests: int) -> Any:
    """Of the first `share` of the requests the output is JSON that is not over at its last token."""
    from framework import SamplingParams

    structured = {"json": SCHEMA} if index < share * requests else None
    return SamplingParams(structured_outputs=structured, seed=index, max_tokens=OUTPUT, ignore_eos=structured is None)


def measure(llm: Any, share: float, requests: int) -> tuple[float, float, float]:
    """(output tokens/s, ms a step of scheduling, ms a step of sampling)."""
    before = llm.engine.stats()
    start = time.perf_counter()
    outputs = llm.generate(
        [f"Record {i} in JSON: " for i in range(requests)], [params(i, share, requests) for i in range(requests)],
        use_tqdm=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    after = llm.engine.stats()
    assert all(len(o.outputs[0].token_ids) == OUTPUT for o in outputs), "a request ended early"
    steps = after["num_steps"] - before["num_steps"]
    part = {
        k: 1e3 * (after["step_seconds"][k] - before["step_seconds"].get(k, 0.0)) / steps for k in ("schedule", "sample")
    }
    return requests * OUTPUT / seconds, part["schedule"], part["sample"]


def rounds(count: int, requests: int, words: list[str]) -> list[tuple[str, float, float, float, float]]:
    """(grammar, share, and what `measure` returns) of every measurement, in the order in which they were made."""
    from framework import LLM

    seen = []
    engines = {name: LLM(overrides=[*words, f"grammar={name}"]) for name in ("xgrammar", "llguidance")}
    for llm in engines.values():
        measure(llm, 0.5, 4)  # compiles and warms up
    for number in range(count):
        for name, llm in engines.items():
            for share in SHARES if number % 2 == 0 else SHARES[::-1]:
                seen.append((name, share, *measure(llm, share, requests)))
    for llm in engines.values():
        llm.close()
    return seen


def print_table(seen: list[tuple[str, float, float, float, float]]) -> None:
    columns: dict[tuple[str, float], list[tuple[float, ...]]] = defaultdict(list)
    for name, share, *result in seen:
        columns[name, share].append(tuple(result))
    print(f"{'grammar':<12}{'structured':>11}{'runs':>6}{'tok/s':>8}{'spread':>12}{'schedule ms':>13}{'sample ms':>11}")
    for (name, share), results in sorted(columns.items(), key=lambda one: (one[0][0] != "xgrammar", one[0][1])):
        rates, schedule, sample = zip(*results, strict=True)
        rate, ms, mask_ms = map(statistics.median, (rates, schedule, sample))
        spread = f"{min(rates):.0f}-{max(rates):.0f}"
        print(f"{name:<12}{share:>10.0%} {len(rates):>6}{rate:>8.0f}{spread:>12}{ms:>13.2f}{mask_ms:>11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--async", dest="ahead", action="store_true", help="engine.async_scheduling=true")
    parser.add_argument("--seen", type=Path, help="a file of results, one a line, that this run adds to")
    args = parser.parse_args()
    words = ["backend=cpu", "engine.max_model_len=128", "scheduler.max_num_seqs=64", "kv_cache.prefix_caching=false"]
    words += [f"engine.async_scheduling={str(args.ahead).lower()}"]
    seen = rounds(args.rounds, args.requests, words)
    if args.seen is not None:
        with args.seen.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in seen)
        seen = [tuple(json.loads(line)) for line in args.seen.read_text().splitlines()]
    print_table(seen)


if __name__ == "__main__":
    main()
