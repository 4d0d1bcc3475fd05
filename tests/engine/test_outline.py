"""What a model declares is known before a weight is read."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from framework.engine.outline import layers_of
from framework.engine.outline_shapes import ShapesAlone
from framework.errors import CheckpointError, PluginError
from framework.interfaces import Checkpoint
from framework_models.llama import Llama

from ..hybrid_model import hybrid

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip


def outline(target, **config):
    checkpoint = Checkpoint("nowhere", "dummy", {**CONFIG, **config})
    return layers_of("mine", target, checkpoint, torch.float32, 64)


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
    assert layers_of(case.name, case.target, case.checkpoint, torch.float32, 64)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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
