"""Float32 logits of each dense family against transformers, over what the family has beyond Llama."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from framework_models.gemma2 import Gemma2
from framework_models.gemma3 import Gemma3, Gemma3ForImages
from framework_models.gpt2 import Gpt2
from framework_models.mistral import Mistral
from framework_models.olmo2 import Olmo2
from framework_models.phi3 import Phi3
from framework_models.qwen2 import Qwen2
from framework_models.qwen3 import Qwen3
from framework_models.smollm3 import SmolLM3

from .comparing import IDS, SIZES, TOLERANCE, ours, saved

LAYERS = {"num_hidden_layers": 4}
WINDOWS = {**LAYERS, "sliding_window": 5, "use_sliding_window": True}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
QWEN2 = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"hidden_size": 40}
WIDE = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"hidden_size": 32}  # heads of 8
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GPT2 = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 1.2, 2.0], "long_factor": [2.0, 5.0, 9.0, 20.0],
}  # fmt: skip
LONGROPE = {"rope_parameters": LONG, "original_max_position_embeddings": 12, "max_position_embeddings": 64}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}

FAMILIES = {
    "gemma2": (Gemma2, hf.Gemma2Config, hf.Gemma2ForCausalLM, {**SIZES, "query_pre_attn_scalar": 7, **LAYERS}),
    "gemma3": (
        Gemma3,
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        {**SIZES, "query_pre_attn_scalar": 7, **LAYERS, "rope_parameters": NESTED},
    ),
    "gpt2": (Gpt2, hf.GPT2Config, hf.GPT2LMHeadModel, GPT2),
    "mistral": (Mistral, hf.MistralConfig, hf.MistralForCausalLM, SIZES),
    "olmo2": (Olmo2, hf.Olmo2Config, hf.Olmo2ForCausalLM, WIDE),
    "phi3": (Phi3, hf.Phi3Config, hf.Phi3ForCausalLM, WIDE),
    "qwen2": (Qwen2, hf.Qwen2Config, hf.Qwen2ForCausalLM, QWEN2),
    "qwen3": (Qwen3, hf.Qwen3Config, hf.Qwen3ForCausalLM, SIZES),
    "smollm3": (SmolLM3, hf.SmolLM3Config, hf.SmolLM3ForCausalLM, SIZES | LAYERS),
}
CASES = {
    "gemma2": ({"sliding_window": 5}, [5, None, 5, None]),
    "gemma2_caps": (
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 6},
        [6, None, 6, None],
    ),
    "gemma2_without_caps": (
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": MIXED, "sliding_window": 5},
        [None, 5, 5, None],
    ),
    "gemma2_biases_and_head": (
        {"attention_bias": True, "tie_word_embeddings": False, "sliding_window": 5},
        [5, None, 5, None],
    ),
    "gemma3": ({"sliding_window": 5, "num_hidden_layers": 6}, [5, 5, 5, 5, 5, None]),
    "gemma3_mixed": (
        {"sliding_window": 5, "layer_types": MIXED, "final_logit_softcapping": 4.0},
        [None, 5, 5, None],
    ),
    "gemma3_pattern": ({"sliding_window": 5, "sliding_window_pattern": 2}, [5, None, 5, None]),
    "gpt2": ({}, [None] * 3),
    "gpt2_scales": (
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_inner": 40},
        [None] * 3,
    ),
    "gpt2_head": ({"tie_word_embeddings": False, "activation_function": "gelu_pytorch_tanh"}, [None] * 3),
    "mistral": ({"sliding_window": 5}, [5, 5]),
    "mistral_without_window": ({"sliding_window": None}, [None, None]),
    "olmo2": ({}, [None, None]),
    "olmo2_biases": ({"attention_bias": True, "tie_word_embeddings": True}, [None, None]),
    "phi3": ({}, [None, None]),
    "phi3_window": ({"sliding_window": 5, "tie_word_embeddings": True}, [5, 5]),
    "phi3_partial": ({"rope_parameters": PARTIAL}, [None, None]),
    "phi3_longrope": (LONGROPE, [None, None]),
    "phi3_longrope_partial": (
        {
            **LONGROPE,
            "rope_parameters": LONG
            | {"partial_rotary_factor": 0.5, "short_factor": [1.0, 2.0], "long_factor": [3.0, 7.0]},
        },
        [None, None],
    ),
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


def test_first_checkpoints_of_gpt2_have_no_prefix_and_carry_masks(tmp_path, build_model):
    expected = saved(tmp_path, hf.GPT2Config(**GPT2), hf.GPT2LMHeadModel)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)}
    save_file(bare | masks, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = ours(build_model, tmp_path, Gpt2, leaves=Gpt2.ignored_weights).logits(IDS)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])  # the whole model; the text model's own word says nothing of its head
def test_text_model_of_a_checkpoint_that_sees_images_is_served_without_the_rest(tied, tmp_path, build_model):
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    text = {**SIZES, **LAYERS, "sliding_window": 5, "rope_parameters": NESTED, "tie_word_embeddings": not tied}
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95, boi_token_index=94,
        eoi_token_index=93, tie_word_embeddings=tied,
    )  # fmt: skip
    ids = IDS.clamp(max=90)
    expected = saved(tmp_path, config, hf.Gemma3ForConditionalGeneration, ids)
    built = ours(build_model, tmp_path, Gemma3ForImages, leaves=Gemma3ForImages.ignored_weights)
    assert built.model.vocab_size == 96
    torch.testing.assert_close(built.logits(ids), expected, atol=TOLERANCE, rtol=1e-5)


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
