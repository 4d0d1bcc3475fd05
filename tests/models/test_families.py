"""Float32 logits of each dense family against transformers, over what the family has beyond Llama."""

import pytest
import torch
import transformers as hf

from framework_models.mistral import Mistral
from framework_models.qwen2 import Qwen2
from framework_models.qwen3 import Qwen3
from framework_models.smollm3 import SmolLM3

from .comparing import IDS, SIZES, TOLERANCE, ours, saved

LAYERS = {"num_hidden_layers": 4}
WINDOWS = {**LAYERS, "sliding_window": 5, "use_sliding_window": True}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
QWEN2 = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"hidden_size": 40}

FAMILIES = {
    "mistral": (Mistral, hf.MistralConfig, hf.MistralForCausalLM, SIZES),
    "qwen2": (Qwen2, hf.Qwen2Config, hf.Qwen2ForCausalLM, QWEN2),
    "qwen3": (Qwen3, hf.Qwen3Config, hf.Qwen3ForCausalLM, SIZES),
    "smollm3": (SmolLM3, hf.SmolLM3Config, hf.SmolLM3ForCausalLM, SIZES | LAYERS),
}
CASES = {
    "mistral": ({"sliding_window": 5}, [5, 5]),
    "mistral_without_window": ({"sliding_window": None}, [None, None]),
    "qwen2": ({}, [None, None]),
    "qwen2_window_off": ({"sliding_window": 5}, [None, None]),
    "qwen2_windows_behind": ({**WINDOWS, "max_window_layers": 1}, [None, 5, 5, 5]),
    "qwen2_windows_by_layer_types": ({**WINDOWS, "layer_types": MIXED}, [None, 5, 5, None]),
    "qwen2_tied": ({"tie_word_embeddings": True}, [None, None]),
    "qwen3_windows": ({**WINDOWS, "max_window_layers": 2}, [None, None, 5, 5]),
    "smollm3": ({}, [None] * 4),
    "smollm3_interval": ({"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}, [None] * 4),
    "smollm3_listed": ({"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False}, [None] * 4),
    "smollm3_windows": ({**WINDOWS, "no_rope_layer_interval": 2}, [None, 5, None, 5]),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES[case.split("_")[0]]
    edits, windows = CASES[case]
    expected = saved(tmp_path, config_class(**{**sizes, **edits}), model_class)
    built = ours(build_model, tmp_path, target)
    assert [layer.window for layer in built.ctx.layers] == windows
    assert [layer.kind for layer in built.ctx.layers] == [layer.group for layer in built.ctx.layers]
    assert expected.abs().max() > 1  # peaked enough to show an error
    torch.testing.assert_close(built.logits(IDS), expected, atol=TOLERANCE, rtol=1e-5)


class _InBfloat16:
    def __init__(self, plan):
        self.plan = plan

    def forward(self, layer, q, k, v):
        return self.plan.forward(layer, q, k, v).to(q.dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_stay_near_float32(family, tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES[family]
    expected = saved(tmp_path, config_class(**sizes), model_class)
    built = ours(build_model, tmp_path, target, dtype=torch.bfloat16)
    built.plans[:] = [_InBfloat16(plan) for plan in built.plans]
    found = built.logits(IDS)
    assert found.dtype == torch.bfloat16
    # 8 bits of mantissa through a few layers: some per cent of the largest logit
    assert (found.float() - expected).abs().max() < 0.06 * expected.abs().max()
