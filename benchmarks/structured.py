"""What structured output costs: tokens/s of the default model at 0, 50 and 100 % structured requests, both grammars.

    python benchmarks/structured.py [--rounds 3] [--requests 16] [--async]

One engine a grammar in one process; rounds go through all of them in turn, so that what else the machine does meets
each alike. Medians; masks are filled while a step is scheduled, and applied while it samples.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--async", dest="ahead", action="store_true", help="engine.async_scheduling=true")
    args = parser.parse_args()
    from framework import LLM

    words = ["backend=cpu", "engine.max_model_len=128", "scheduler.max_num_seqs=64", "kv_cache.prefix_caching=false"]
    words += [f"engine.async_scheduling={str(args.ahead).lower()}"]
    engines = {name: LLM(overrides=[*words, f"grammar={name}"]) for name in ("xgrammar", "llguidance")}
    seen: dict[tuple[str, float], list[tuple[float, float, float]]] = defaultdict(list)
    for number in range(args.rounds + 1):
        for name, llm in engines.items():
            for share in (0.0, 0.5, 1.0):
                result = measure(llm, share, args.requests)
                if number:  # the first round compiles and warms up
                    seen[name, share].append(result)
    print(f"{'grammar':<12}{'structured':>11}{'tok/s':>8}{'schedule ms':>13}{'sample ms':>11}")
    for (name, share), results in seen.items():
        rate, schedule, sample = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:<12}{share:>10.0%} {rate:>8.0f}{schedule:>13.2f}{sample:>11.2f}")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
