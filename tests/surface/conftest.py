"""Folders and engines of the tests from outside: crafted models, a small tokenizer, the command line."""

import os
import subprocess
import sys

import pytest
import torch

from framework import LLM
from framework.testing.crafted import save_crafted

from ..word_model import EOS, VOCAB, add_tokenizer, chain_table

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=8", "kv_cache.num_blocks=64")
TEMPLATE = "{% for m in messages %}{{ m['role'][0] | replace('u', 'w5') }} {{ m['content'] }} {% endfor %}w9"


def mixed_table():
    """Logits without ties, so that every token has a rank of its own."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`chain` and `mixed` have a tokenizer, `bare` is `mixed` without one. Their eos is 3."""
    root = tmp_path_factory.mktemp("surface")
    made = {"chain": chain_table(), "mixed": mixed_table(), "bare": mixed_table()}
    paths = {name: save_crafted(root / name, table, eos_token_id=EOS) for name, table in made.items()}
    add_tokenizer(paths["chain"], TEMPLATE)
    add_tokenizer(paths["mixed"], TEMPLATE)
    return paths


@pytest.fixture(scope="module", params=["sync", "async"])
def steps(request):
    """Each sentence holds a step at a time and with steps in flight."""
    return f"engine.async_scheduling={str(request.param == 'async').lower()}"


@pytest.fixture(scope="module")
def chain(folders, steps):
    with LLM(folders["chain"], overrides=[*SMALL, steps]) as llm:
        yield llm


@pytest.fixture(scope="module")
def mixed(folders, steps):
    with LLM(folders["mixed"], overrides=[*SMALL, steps]) as llm:
        yield llm


@pytest.fixture
def command(tmp_path):
    """Runs `python -m framework WORDS` in an empty folder; stdout and stderr are bytes."""

    def run(*words, **options):
        return subprocess.run(
            [sys.executable, "-m", "framework", *words], cwd=tmp_path, capture_output=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
        )  # fmt: skip

    return run
