"""Engines under the soak, in all the settings it goes through, and what must not be left in one at a quiet moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model import MAX_LEN
from traffic import MAX_PROMPT

from framework import LLM, AsyncLLM, SamplingParams

_FIXED = ["engine.dtype=float32", "engine.batch_invariant=true", "kv_cache.block_size=8",
          f"engine.max_model_len={MAX_LEN}"]  # fmt: skip
_TIGHT = ["kv_cache.num_blocks=21", "scheduler.max_num_seqs=8", "scheduler.max_num_batched_tokens=48"]
_SWAP = ["scheduler.preemption=swap"]
_AHEAD = ["engine.async_scheduling=true"]
_FAULTS = ["late_saves=2", "failed_loads=0.2", "dropped_loads=0.1", "dropped_saves=0.1", "reorder=true"]


def _memory(store: str, is_async: bool) -> list[str]:
    options = {"store": store, "capacity_bytes": 600_000, "async_loads": str(is_async).lower()}  # 150 blocks
    return ["kv_connector=memory", *(f"kv_connector.{key}={value}" for key, value in options.items())]


def _faulty(store: str, is_async: bool) -> list[str]:
    options = f"store:{store},capacity_bytes:600000,async_loads:{str(is_async).lower()}"
    faults = [f"kv_connector.{word}" for word in _FAULTS]
    return ["kv_connector=faulty", f"kv_connector.inner_options={{{options}}}", *faults]


STEADY = [*_AHEAD, *_SWAP, *_faulty("steady", is_async=True)]
"""Of the engine that lives through the whole soak."""

CHANGING = (
    [],
    [*_SWAP, *_memory("a", is_async=False)],
    [*_AHEAD, *_faulty("b", is_async=False)],
    [*_AHEAD, *_SWAP, "kv_cache.num_swap_blocks=6"],
    [*_SWAP, *_faulty("c", is_async=True)],
    [*_AHEAD, *_memory("d", is_async=True), "kv_cache.prefix_caching=false"],
)
"""Of the one that is closed and made anew at each quiet moment, in turn."""


def make_engine(folder: Path, words: list[str], backend: str) -> AsyncLLM:
    return AsyncLLM(str(folder), overrides=[f"backend={backend}", *_FIXED, *_TIGHT, *words])


def make_quiet(folder: Path, backend: str) -> LLM:
    """The one that says what is right: one request at a time, nothing cached, room for all."""
    quiet = ["kv_cache.num_blocks=100", "kv_cache.prefix_caching=false", "scheduler.max_num_seqs=4"]
    words = [f"backend={backend}", *_FIXED, *quiet]
    return LLM(str(folder), overrides=[*words, f"scheduler.max_num_batched_tokens={MAX_PROMPT}"])


def warm_up(quiet: LLM) -> None:
    """Meets every number of rows: oneDNN keeps a compiled product for each, of some 400 kB, and for up to 1024 of them.
    Memory that grows after this is ours."""
    for length in range(1, MAX_PROMPT + 1):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        quiet.generate({"prompt_token_ids": [1] * length}, params, use_tqdm=False)


def leftovers(llm: AsyncLLM, stats: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an engine that has nothing to do."""
    core = llm._engine.core
    wanted = {
        "num_running": 0,
        "num_waiting": 0,
        "num_free_blocks": stats["num_blocks"] - 1,
        "num_free_swap_blocks": stats["num_swap_blocks"],
    }
    yield from (f"{name}={stats[name]}, not {value}" for name, value in wanted.items() if stats[name] != value)
    if core.has_work() or llm._engine.has_unfinished_requests() or llm._listeners:
        yield "requests, blocks or listeners that it still waits for"
    part = core.scheduler._connector
    while part is not None:
        for name, value in vars(part).items():
            if isinstance(value, dict | set | list) and value and name not in ("_kv", "_specs"):
                yield f"{len(value)} in {type(part).__name__}.{name}"
        part = getattr(part, "_connector", None) or getattr(part, "_inner", None)
