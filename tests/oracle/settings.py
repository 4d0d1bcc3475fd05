"""Settings in which the oracle's tokens must stay the same: factors, words of a case, what its requests ask for.

A case is one value of each factor. Here is no test; those of this folder run the cases.
"""

from __future__ import annotations

from typing import Any

from .tiny import NUM_REQUESTS, NUM_TOKENS, prompts

FAULTS = {
    "late": ["late_saves=3"],
    "failed": ["failed_loads=0.6"],
    "dropped": ["dropped_loads=0.3", "dropped_saves=0.3"],
    "reordered": ["reorder=true"],
    "everything": ["late_saves=2", "failed_loads=0.3", "dropped_loads=0.2", "dropped_saves=0.2", "reorder=true"],
}
"""Words of the fault-injecting connector, by the name of the fault."""

FACTORS: dict[str, list[Any]] = {
    "chunk": [1, 7, 64, 4096],
    "block_size": [8, 16, 32],
    "concurrent": [1, 3, 7, 16],
    "pool": ["roomy", "tight"],
    "cache": ["off", "cold", "warm"],  # warm: the requests have run before
    "steps": ["sync", "async"],
    "preemption": ["recompute", "swap", "little"],  # little: swap space for two blocks
    "connector": ["none", "memory", "small", *FAULTS],
    "loads": ["within", "beside"],
    "n": [1, 3],
    "stop": ["off", "on"],
    "prompt_logprobs": ["off", "on"],
}
BASE: dict[str, Any] = {
    "chunk": 4096, "block_size": 16, "concurrent": 1, "pool": "roomy", "cache": "off", "steps": "sync",
    "preemption": "recompute", "connector": "none", "loads": "within", "n": 1, "stop": "off", "prompt_logprobs": "off",
}  # fmt: skip
"""Each request alone, in one chunk, a step at a time, without a cache."""

STORE = "oracle"  # of all connectors here: whoever uses it drops it


def case_id(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def num_requests(case: dict[str, Any]) -> int:
    """A token a step makes many steps: fewer requests keep the suite short, and still share a prefix."""
    return 5 if case["chunk"] == 1 else NUM_REQUESTS


def num_passes(case: dict[str, Any]) -> int:
    """A connector has most to give when the requests have run before."""
    return 2 if case["cache"] == "warm" or case["connector"] != "none" else 1


def num_completions(case: dict[str, Any], index: int) -> int:
    """Of request `index`: requests of one completion stand beside those of several."""
    return case["n"] if index % 2 else 1


def words_of(case: dict[str, Any]) -> list[str]:
    """A tight pool holds the longest request and a third of another one."""
    longest = max(len(p) for p in prompts(NUM_REQUESTS)) + NUM_TOKENS
    blocks = -(-longest // case["block_size"])
    pool = 1000 if case["pool"] == "roomy" else 1 + blocks + -(-blocks // 3)
    little = ["kv_cache.num_swap_blocks=2"] if case["preemption"] == "little" else []
    return [
        "backend=cpu",
        "engine.dtype=float32",
        f"scheduler.max_num_batched_tokens={case['chunk']}",
        f"scheduler.max_num_seqs={case['concurrent']}",
        f"kv_cache.block_size={case['block_size']}",
        f"kv_cache.num_blocks={pool}",
        f"kv_cache.prefix_caching={str(case['cache'] != 'off').lower()}",
        f"engine.async_scheduling={str(case['steps'] == 'async').lower()}",
        f"scheduler.preemption={'recompute' if case['preemption'] == 'recompute' else 'swap'}",
        *little,
        *connector_words(case["connector"], case["loads"] == "beside"),
    ]


def connector_words(name: str, is_async: bool) -> list[str]:
    if name == "none":
        return []
    capacity = 200_000 if name == "small" else 1 << 30  # 200 kB: 16 blocks of 8 tokens
    options = {"store": STORE, "capacity_bytes": capacity, "async_loads": str(is_async).lower()}
    if name in FAULTS:
        inner = ",".join(f"{key}:{value}" for key, value in options.items())
        faults = [f"kv_connector.{word}" for word in FAULTS[name]]
        return ["kv_connector=faulty", f"kv_connector.inner_options={{{inner}}}", *faults]
    return ["kv_connector=memory", *(f"kv_connector.{key}={value}" for key, value in options.items())]
