"""Float32 logits of our models against transformers, over every switch of their configs."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from framework_models.llama import Llama
from framework_models.qwen3 import Qwen3

from .comparing import IDS, SIZES, TOLERANCE, ours, saved

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA_CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "head_dim_from_hidden_size": {"head_dim": None},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 16}},
    "llama3_original_length_by_default": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}},
    "yarn_with_every_key": {
        "rope_parameters": YARN
        | {
            "rope_theta": 100.0,
            "beta_fast": 8,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
        }
    },
    "yarn_attention_factor": {"rope_parameters": YARN | {"rope_theta": 10000.0, "attention_factor": 1.3}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_llama_logits_equal_transformers(case, tmp_path, build_model):
    config = LlamaConfig(**{**SIZES, **LLAMA_CASES[case]})
    expected = saved(tmp_path, config, LlamaForCausalLM)
    found = ours(build_model, tmp_path, Llama).logits(IDS)
    assert expected.abs().max() > 1  # peaked enough to show an error
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("edits", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str)
def test_qwen3_logits_equal_transformers(edits, tmp_path, build_model):
    expected = saved(tmp_path, Qwen3Config(**{**SIZES, **edits}), Qwen3ForCausalLM)
    found = ours(build_model, tmp_path, Qwen3).logits(IDS)
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


def test_legacy_rope_keys_mean_the_same_as_rope_parameters(tmp_path, build_model):
    config = LlamaConfig(
        **SIZES, rope_parameters=LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 16}
    )
    expected = saved(tmp_path, config, LlamaForCausalLM)
    stored = json.loads((tmp_path / "config.json").read_text())
    rope = stored.pop("rope_parameters")
    stored["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(stored | {"rope_scaling": rope}))
    torch.testing.assert_close(ours(build_model, tmp_path, Llama).logits(IDS), expected, atol=TOLERANCE, rtol=1e-5)


def test_qwen3_without_head_dim_takes_128(build_model, tmp_path):
    config = {k: v for k, v in SIZES.items() if k != "head_dim"}
    assert Qwen3.read_config(config).head_dim == Qwen3Config().head_dim == 128


def test_head_in_a_checkpoint_declared_tied_is_served(tmp_path, build_model):
    expected = saved(tmp_path, LlamaConfig(**SIZES), LlamaForCausalLM)
    found = ours(build_model, tmp_path, Llama, tie_word_embeddings=True).logits(IDS)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


def test_features_are_the_inputs_of_the_layers_asked_for(tmp_path, build_model):
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        states = model(IDS[None], output_hidden_states=True).hidden_states
    out = ours(build_model, tmp_path, Llama).run(IDS, feature_layers=(1, 0))
    torch.testing.assert_close(out.features[0], states[1][0], atol=TOLERANCE, rtol=1e-5)
    torch.testing.assert_close(out.features[1], states[0][0], atol=0, rtol=0)
    torch.testing.assert_close(out.hidden, states[2][0], atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("target", [Llama, Qwen3])
def test_states_that_are_wanted_are_those_of_a_pass_that_computes_all(tmp_path, build_model, target):
    saved(
        tmp_path,
        *((LlamaConfig(**SIZES), LlamaForCausalLM) if target is Llama else (Qwen3Config(**SIZES), Qwen3ForCausalLM)),
    )
    model, at = ours(build_model, tmp_path, target), torch.tensor([2, 11, 17])
    every = model.run(IDS).hidden
    found = model.run(IDS, feature_layers=(1,), wanted=at)
    torch.testing.assert_close(found.hidden, every[at], atol=TOLERANCE, rtol=1e-5)
    assert len(found.features[0]) == len(IDS)
    assert len(model.run(IDS, feature_layers=(2,), wanted=at).features[0]) == len(IDS)


def test_layers_are_declared_in_order_with_their_sizes(tmp_path, build_model):
    saved(tmp_path, LlamaConfig(**SIZES), LlamaForCausalLM)
    layers = ours(build_model, tmp_path, Llama).ctx.layers
    assert [(x.index, x.group, x.num_heads, x.num_kv_heads, x.head_dim) for x in layers] == [
        (0, "full", 4, 2, 10),
        (1, "full", 4, 2, 10),
    ]
    assert layers[0].scale == pytest.approx(10**-0.5)
