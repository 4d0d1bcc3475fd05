"""`model=transformers` on a CUDA device: the tokens of transformers on the host, for chunks, batches and preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import LLM, SamplingParams

from ..models.generic_checkpoints import ARCHITECTURES, VOCAB, make

pytestmark = pytest.mark.cuda

NUM_TOKENS = 12
TOLERANCE = 1e-3  # float32 products of another device, through a few layers of random weights
SETTINGS = {
    "whole": ["scheduler.max_num_batched_tokens=2048", "kv_cache.num_blocks=400"],
    "chunks": ["scheduler.max_num_batched_tokens=16", "scheduler.max_num_seqs=8", "kv_cache.num_blocks=400"],
    "preempted": ["kv_cache.num_blocks=40", "kv_cache.prefix_caching=false"],
}
WIDE = {"gpt_oss": {"head_dim": 32}, "gemma2": {"head_dim": 32}, "latent": {"qk_nope_head_dim": 24}}
"""Heads of 32, as those of the others with a hidden size of 128 are: kernels have no narrower ones."""
DEVICE = ["backend=cuda", "engine.dtype=float32", "engine.max_model_len=160"]


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 17, 60]))] for _ in range(9)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_transformers_on_the_host(name: str, setting: str, tmp_path: Path) -> None:
    model = make(name, hidden_size=128, **WIDE.get(name, {}))
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=-1)
    words = ["model=transformers", *DEVICE, *SETTINGS[setting]]
    with LLM(str(tmp_path), overrides=words) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert output.error is None
        compare(model, prompt, output.outputs[0])


def compare(model: Any, prompt: list[int], completion: Any) -> None:
    """Teacher-forced: a near-tie may turn a token, and then the rows behind it follow what was drawn."""
    found = torch.tensor([[row[i].logprob for i in range(VOCAB)] for row in completion.logprobs])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0]
    wanted = logits[len(prompt) - 1 :].log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
