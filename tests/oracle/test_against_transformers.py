"""The engine against transformers on tiny random models: equal greedy tokens, texts and logprobs in every setting."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import SamplingParams
from framework_connectors.block_store import drop_store

from .covering import covering
from .running import run_case
from .settings import BASE, FACTORS, STORE, case_id, num_completions, num_requests
from .tiny import NUM_TOKENS, SAVE, VOCAB, Case, ending

MIN_GAP = 1e-3  # float32 rounding moves logits by about 1e-5; a wider gap than this cannot be turned by it
TOLERANCE = 1e-4
TOP = 4  # prompt logprobs
PAIRS = covering(FACTORS)
NUM_SLICES = 16  # of the array of triples, which is computed only where it is run
triples = cache(lambda: covering(FACTORS, strength=3, tries=10))


def params_of(case: dict[str, Any], index: int, want: Case) -> SamplingParams:
    """Of request `index`: what a case asks for stands beside requests without it, in changing company."""
    wants_stop = case["stop"] == "on" and index % 3
    return SamplingParams(
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        n=num_completions(case, index),
        logprobs=VOCAB if index % 3 == 1 else None,
        prompt_logprobs=TOP if case["prompt_logprobs"] == "on" and index % 4 else None,
        stop=want.stops(index) if wants_stop else None,
        include_stop_str_in_output=index % 2 == 0,
    )


def check(name: str, case: dict[str, Any], folders: dict[str, Path], oracle: Any, *words: str) -> None:
    wanted: list[Case] = oracle(name)[: num_requests(case)]
    params = [params_of(case, index, want) for index, want in enumerate(wanted)]
    outputs, _ = run_case(folders[name], case, [w.prompt for w in wanted], params, *words)
    for want, asked, output in zip(wanted, params, outputs, strict=True):
        assert output.error is None and [c.index for c in output.outputs] == list(range(asked.n))
        for completion in output.outputs:
            check_completion(completion, asked, want)
        check_prompt_logprobs(output, asked, want)
    if case["cache"] == "warm" and case["pool"] == "roomy":
        assert outputs[0].num_cached_tokens > 0


def check_completion(got: Any, asked: SamplingParams, want: Case) -> None:
    tokens, text, stop = ending(want.tokens, asked.stop or (), asked.include_stop_str_in_output)
    assert (got.token_ids, got.text, got.stop_reason) == (tokens, text, stop)
    assert got.finish_reason == ("length" if stop is None else "stop")
    if asked.logprobs is None:
        assert got.logprobs is None
        return
    rows = torch.tensor([[entry[i].logprob for i in range(VOCAB)] for entry in got.logprobs])
    assert (rows - want.logprobs[: len(tokens)]).abs().max() < TOLERANCE
    assert [entry[t].rank for entry, t in zip(got.logprobs, tokens, strict=True)] == [1] * len(tokens)


def check_prompt_logprobs(output: Any, asked: SamplingParams, want: Case) -> None:
    if asked.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert output.num_cached_tokens == 0 and output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs[1:]
    for token, row, entry in zip(want.prompt[1:], want.prompt_logprobs, entries, strict=True):
        assert len(entry) in (TOP, TOP + 1) and token in entry
        assert all(abs(found.logprob - row[i].item()) < TOLERANCE for i, found in entry.items())
        best = sorted(entry.values(), key=lambda e: e.rank)[:TOP]
        assert (torch.tensor([e.logprob for e in best]) - row.topk(TOP).values).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", SAVE)
def test_every_step_of_the_oracle_is_clear_of_ties(name: str, oracle: Any) -> None:
    assert min(case.gap for case in oracle(name)) > MIN_GAP


@pytest.mark.parametrize("name", SAVE)
def test_stop_strings_of_the_oracle_do_stop_and_at_several_places(name: str, oracle: Any) -> None:
    ends = [ending(want.tokens, want.stops(index), False) for index, want in enumerate(oracle(name))]
    assert all(stop is not None for _, _, stop in ends)
    assert len({len(tokens) for tokens, _, _ in ends}) > 3


@pytest.mark.usefixtures("fresh_store")
@pytest.mark.parametrize("case", PAIRS, ids=case_id)
@pytest.mark.parametrize("name", SAVE)
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, case: dict[str, Any], folders: dict[str, Path], oracle: Any
) -> None:
    check(name, case, folders, oracle)


@pytest.mark.full
@pytest.mark.parametrize("part", range(NUM_SLICES))
@pytest.mark.parametrize("name", SAVE)
def test_greedy_tokens_and_logprobs_equal_transformers_for_any_three_values(
    name: str, part: int, folders: dict[str, Path], oracle: Any
) -> None:
    for case in triples()[part::NUM_SLICES]:
        drop_store(STORE)
        check(name, case, folders, oracle)


def test_tight_pools_of_the_array_do_preempt(folders: dict[str, Path], oracle: Any) -> None:
    case = {**BASE, "chunk": 64, "block_size": 8, "concurrent": 16, "pool": "tight", "steps": "async"}
    prompts = [want.prompt for want in oracle("llama")]
    params = [SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)] * len(prompts)
    _, stats = run_case(folders["llama"], case, prompts, params)
    assert stats["num_preemptions"] > 0
