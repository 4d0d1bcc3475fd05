"""Checkpoints of this folder, and what transformers makes of its prompts: computed once for all files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from framework_connectors.block_store import drop_store

from .settings import STORE
from .tiny import NUM_REQUESTS, NUM_TOKENS, SAVE, continuations, prompts


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in SAVE.items()}


@pytest.fixture(scope="session")
def oracle(folders: dict[str, Path]) -> Any:
    return cache(lambda name: continuations(folders[name], prompts(NUM_REQUESTS), NUM_TOKENS))


@pytest.fixture
def fresh_store() -> Iterator[None]:
    """The connectors of a test begin with nothing, and leave nothing."""
    drop_store(STORE)
    yield
    drop_store(STORE)
