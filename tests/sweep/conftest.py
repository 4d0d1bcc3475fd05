"""A model that loads at once."""

import os
import subprocess
import sys

import pytest
import torch

from framework.testing.crafted import save_crafted

VOCAB = 24


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Next tokens by chance, so that seeds matter."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
    return save_crafted(tmp_path_factory.mktemp("sweep") / "model", table)


@pytest.fixture
def python(tmp_path):
    """Runs `python WORDS` in an empty folder."""

    def run(*words):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)

    return run
