"""Checkpoints of this folder, and what transformers makes of its prompts: computed once for all files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .tiny import NUM_REQUESTS, NUM_TOKENS, SAVE, continuations, prompts


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in SAVE.items()}


@pytest.fixture(scope="session")
def oracle(folders: dict[str, Path]) -> Any:
    return cache(lambda name: continuations(folders[name], prompts(NUM_REQUESTS), NUM_TOKENS))
