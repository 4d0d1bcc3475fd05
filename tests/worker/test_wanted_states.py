"""Which hidden states of a step the runner asks its model for, and that a model which gives all of them serves."""

from dataclasses import replace

import pytest
import torch

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted
from framework_models.llama import Llama

PROMPTS = [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [4, 5]]
WORDS = [
    "engine.dtype=float32",
    "engine.max_model_len=64",
    "scheduler.max_num_batched_tokens=4",
    "kv_cache.block_size=4",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) * 3
    return save_crafted(tmp_path_factory.mktemp("wanted") / "mixed", table)


def served(folder, **words):
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, **words)
    with LLM(folder, overrides=WORDS) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture
def asked(monkeypatch):
    """[(tokens, how many of them are wanted, None for all)] of the passes from here on."""
    passes, forward = [], Llama.forward

    def noted(self, x, positions, ctx):
        passes.append((len(x), None if ctx.wanted is None else len(ctx.wanted)))
        return forward(self, x, positions, ctx)

    monkeypatch.setattr(Llama, "forward", noted)
    return passes


def test_chunks_that_sample_nothing_want_one_token_and_others_those_that_sample(folder, asked):
    served(folder)
    assert asked[:2] == [(4, 1), (4, 1)]
    assert asked[2:4] == [(4, 1), (2, None)]  # three and one token, of which one samples; then both rows do


def test_prompts_whose_logprobs_are_asked_for_want_all_tokens(folder, asked):
    served(folder, prompt_logprobs=1)
    assert asked[:2] == [(4, None), (4, None)]


def test_a_model_that_computes_all_states_serves_the_same_tokens(folder, monkeypatch):
    expected, forward = served(folder), Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, x, p, ctx: forward(self, x, p, replace(ctx, wanted=None)))
    assert served(folder) == expected
