"""What a model declares is known before a weight is read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from framework.engine.outline import layers_of, names_of
from framework.engine.outline_shapes import ShapesAlone
from framework.errors import CheckpointError, ConfigError, PluginError
from framework.interfaces import Checkpoint
from framework_models.llama import Llama

from ..hybrid_model import hybrid

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip


def every(name):
    """Of a checkpoint that has every tensor."""
    return True


def outline(target, has=every, **config):
    checkpoint = Checkpoint("nowhere", "dummy", {**CONFIG, **config})
    return layers_of("mine", target, checkpoint, torch.float32, 64, has)


def test_layers_are_those_that_the_model_declares():
    found = outline(hybrid((8, None, 8)))
    assert [(x.index, x.group, x.window, x.num_kv_heads, x.head_dim) for x in found] == [
        (0, "w8", 8, 2, 16), (1, "full", None, 2, 16), (2, "w8", 8, 2, 16),
    ]  # fmt: skip


def test_a_window_that_no_request_outgrows_is_none():
    found = outline(hybrid((63, 64, None)))  # of a max_model_len of 64
    assert [(x.group, x.window, x.kind) for x in found] == [
        ("w63", 63, "sliding"), ("full", None, "full"), ("full", None, "full"),
    ]  # fmt: skip


class WindowOfATensor(Llama):
    """Layers have a window in checkpoints that have a tensor of it."""

    def attention(self, ctx, dense, index, rotary, **others):
        if ctx.weights.has("model.window"):
            dense = replace(dense, windows=(8, None, 8))
        return super().attention(ctx, dense, index, rotary, **others)


@pytest.mark.parametrize(("names", "windows"), [({"model.window"}, [8, None, 8]), (set(), [None] * 3)])
def test_tensors_are_those_that_the_checkpoint_has(names, windows):
    assert [layer.window for layer in outline(WindowOfATensor, has=names.__contains__)] == windows


class OneLoader:
    """A loader of a checkpoint with these names, which tells what is done with its weights."""

    def __init__(self, *names):
        self.names, self.told = names, []

    def open(self, checkpoint, *, dtype, device, seed):
        self.told.append("opened")
        return SimpleNamespace(has=self.names.__contains__, close=lambda: self.told.append("closed"))


def test_checkpoint_is_opened_when_a_name_is_asked_for_and_closed_again():
    loader, backend = OneLoader("a"), SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    with names_of(Checkpoint("nowhere", "mine", CONFIG), loader, backend) as has:
        assert loader.told == []
        assert (has("a"), has("b")) == (True, False)
        assert loader.told == ["opened"]
    assert loader.told == ["opened", "closed"]


def test_what_a_loader_raises_is_none_of_the_models():
    def broken(name):
        raise OSError("the disk has gone")

    with pytest.raises(OSError, match="the disk has gone"):
        outline(WindowOfATensor, has=broken)


def test_model_without_attention_is_refused_by_name():
    class NoLayers:
        def __init__(self, config, ctx):
            self.vocab_size = 64

    with pytest.raises(PluginError, match="model=mine declares no attention layer"):
        outline(NoLayers)


def test_weights_take_no_memory():
    huge = outline(Llama, vocab_size=10**9, hidden_size=10**6, intermediate_size=10**7)  # some 10^17 bytes
    assert len(huge) == 3


def test_building_one_imports_no_compiler():
    """Which takes seconds; in a process of its own, because other tests may have imported it."""
    program = """
import sys
import torch
from framework.engine.outline import layers_of
from framework_models.cases import gemma2, gpt_oss, llama
for case in (*llama(), *gemma2(), *gpt_oss()):
    assert layers_of(case.name, case.target, case.checkpoint, torch.float32, 64, lambda name: True)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.complex64])
def test_shapes_and_dtypes_are_those_that_torch_gives(dtype):
    def answers(device):
        x, y = torch.empty(3, 4, dtype=dtype, device=device), torch.empty(3, 2, dtype=dtype, device=device)
        made = (x + 1, 1.0 + x, x * 2.5, 2 - x, x / 2, torch.cat([x, y], dim=-1), torch.cat((x, x)), torch.cat([x], 1))
        return [(one.shape, one.dtype) for one in made]

    with ShapesAlone():
        assert answers("meta") == answers("cpu")


def test_concatenation_that_torch_refuses_is_refused():
    with ShapesAlone(), pytest.raises(RuntimeError, match=r"Sizes of tensors must match|size"):
        torch.cat([torch.empty(2, 3, device="meta"), torch.empty(2, 4, device="meta")])


def test_heads_that_kv_heads_do_not_share_out_evenly_are_refused():
    class Uneven(Llama):
        def attention(self, ctx, dense, index, rotary, **others):
            return super().attention(ctx, replace(dense, num_kv_heads=3), index, rotary, **others)

    with pytest.raises(
        ConfigError, match=r"layer 0: num_heads=4 is no multiple of num_kv_heads=3, .* sizes of the model"
    ):
        outline(Uneven)


def test_what_the_model_refuses_is_told_in_its_own_words():
    with pytest.raises(CheckpointError, match="intermediate_size must be a whole number"):
        outline(Llama, intermediate_size=0)


def test_model_that_looks_at_values_is_refused_by_name():
    class Looks(Llama):
        def __init__(self, config, ctx):
            super().__init__(config, ctx)
            self.first = self.embed_tokens.weight[0, 0].item()

    with pytest.raises(
        PluginError, match=r"model=mine cannot be built without its weights \(.*at shapes and at no value"
    ):
        outline(Looks)
