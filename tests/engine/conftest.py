"""One small engine of a crafted model: greedy goes from t to t + 1."""

import pytest
import torch

from framework import LLM
from framework.testing.crafted import save_crafted

VOCAB = 20


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 8.0
    return save_crafted(tmp_path_factory.mktemp("engine") / "chain", table)


@pytest.fixture
def llm(folder):
    words = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=2", "kv_cache.num_blocks=17"]
    with LLM(folder, overrides=words) as made:
        yield made
