"""What plugins declared before weights load must hold once they have, or an error names the plugin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework import LLM, SamplingParams
from framework.errors import PluginError
from framework_attention.cpu import CpuAttention
from framework_models.llama import Llama

from ..hybrid_model import hybrid, save_random

WORDS = ("backend=cpu", "engine.dtype=float32", "kv_cache.num_blocks=20")
WINDOW = "model.window"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("build") / "model", 3)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Any:
    """family(target) puts a model in the place of Llama's."""
    return lambda target: monkeypatch.setattr("framework_models.llama.Llama", target)


class WindowOfATensor(Llama):
    """Layers have a window in checkpoints that have a tensor of it."""

    def __init__(self, config: Any, ctx: Any) -> None:
        super().__init__(config, ctx)
        if ctx.weights.has(WINDOW):
            ctx.weights.take(WINDOW, (1,))

    def attention(self, ctx: Any, dense: Any, index: int, rotary: Any, **others: Any) -> Any:
        if ctx.weights.has(WINDOW):
            dense = replace(dense, windows=(8,) * 3)
        return super().attention(ctx, dense, index, rotary, **others)


@pytest.mark.parametrize("is_there", [False, True])
def test_layers_follow_from_the_tensors_that_a_checkpoint_has(
    folder: Path, tmp_path: Path, family: Any, is_there: bool
) -> None:
    weights = load_file(folder / "model.safetensors")
    more = {WINDOW: torch.ones(1)} if is_there else {}
    save_file({**weights, **more}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    family(WindowOfATensor)
    with LLM(tmp_path, overrides=WORDS) as llm:
        (group,) = llm.engine.facts["kv_groups"]
        (output,) = llm.generate([[1, 2, 3] * 5], SamplingParams(max_tokens=3, detokenize=False), use_tqdm=False)
    assert group["window"] == (8 if is_there else None)
    assert len(output.outputs[0].token_ids) == 3


class KnowsItsDevice(Llama):
    def attention(self, ctx: Any, dense: Any, index: int, rotary: Any, **others: Any) -> Any:
        scale = 0.25 if ctx.device.type == "meta" else 0.5
        return super().attention(ctx, replace(dense, scale=scale), index, rotary, **others)


class DeclaresOneMore(Llama):
    def __init__(self, config: Any, ctx: Any) -> None:
        super().__init__(config, ctx)
        if ctx.device.type != "meta":
            ctx.add_layer("full", 4, 2, 16, 0.25)


class OtherVocabulary(Llama):
    def __init__(self, config: Any, ctx: Any) -> None:
        super().__init__(config, ctx)
        self.vocab_size += 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (KnowsItsDevice, r"model=llama declares other .* \(.*index=0.*scale=0.5.*\) than without \(.*scale=0.25"),
        (DeclaresOneMore, r"model=llama declares other .* \(.*index=3.*\) than without \(none\)"),
        (OtherVocabulary, r"model=llama has vocab_size=49, and config.json of .* says 48\. That is a fault of the plu"),
    ],
)
def test_model_that_is_not_what_was_known_of_it_is_refused_by_name(
    folder: Path, family: Any, target: Any, message: str
) -> None:
    family(target)
    with pytest.raises(PluginError, match=message):
        LLM(folder, overrides=WORDS)


def test_attention_whose_groups_do_not_fit_into_one_memory_is_refused_by_name(
    folder: Path, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_spec = CpuAttention.kv_spec

    def bytes_by_window(self: CpuAttention, layer: Any) -> Any:
        spec = kv_spec(self, layer)
        return spec if layer.window is None else replace(spec, block_bytes=spec.block_bytes // 2)

    family(hybrid((8, None, 8)))
    monkeypatch.setattr(CpuAttention, "kv_spec", bytes_by_window)
    with pytest.raises(PluginError, match=r"attention=cpu wants memory of .* for the layers of KV group '(w8|full)"):
        LLM(folder, overrides=WORDS)
