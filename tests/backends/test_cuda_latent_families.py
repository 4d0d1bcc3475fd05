"""Latent attention and its mixtures on a CUDA device: the tokens and logprobs of the host's engine, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..oracle.latent_families import FAMILIES, save
from .test_cuda_families import assert_alike, served

pytestmark = pytest.mark.cuda

SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "moe_intermediate_size": 64, "initializer_range": 0.1,
}  # fmt: skip
"""Widths that every kernel of products knows."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param), **SIZES)


@pytest.fixture(scope="module")
def host(folder: Path) -> list[Any]:
    return served(folder, "backend=cpu")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("engine.graphs=off", "scheduler.max_num_batched_tokens=16"),
        ("engine.batch_invariant=true",),
        ("kv_cache.block_size=32", "scheduler.max_num_batched_tokens=100"),
    ],
    ids=["graphs", "chunks", "invariant", "blocks_of_32"],
)
def test_tokens_and_logprobs_are_those_of_the_host(folder: Path, host: list[Any], words: tuple[str, ...]) -> None:
    assert_alike(served(folder, "backend=cuda", "attention=mla_triton", *words), host)
