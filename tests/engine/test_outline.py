"""What a model declares is known before a weight is read."""

from __future__ import annotations

import pytest
import torch

from framework.engine.outline import layers_of
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
