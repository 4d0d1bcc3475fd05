"""Runs the requests of a case and holds the engine to what must be true after each drain: nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from framework import LLM, SamplingParams

from .settings import num_passes, words_of


def run_case(
    folder: Path, case: dict[str, Any], prompts: list[list[int]], params: list[SamplingParams], *words: str
) -> tuple[list[Any], dict[str, Any]]:
    """(outputs, counters) of the last pass over the prompts. words: more of them, behind those of the case."""
    with LLM(model=str(folder), overrides=[*words_of(case), *words]) as llm:
        for _ in range(num_passes(case)):
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            assert_nothing_left(llm)
        return outputs, llm.engine.stats()


def assert_nothing_left(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1  # all but the null block
    assert stats["num_free_swap_blocks"] == stats["num_swap_blocks"]
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert not llm.engine.has_unfinished_requests() and not llm.engine.core.has_work()
