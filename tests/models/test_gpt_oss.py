"""gpt-oss against transformers: sinks, windows, biases, the clamped activation, interleaved and MXFP4 experts."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from framework.errors import CheckpointError
from framework_loaders.dummy import DummySource
from framework_models.gpt_oss import GptOss

from .comparing import IDS, SIZES, TOLERANCE, ours, saved

YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CONFIG = SIZES | {
    "num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5,
    "rope_parameters": YARN,
}  # fmt: skip
CASES = {
    "plain": {},
    "clamped": {"swiglu_limit": 0.5},
    "other_layers_slide": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "one_expert": {"num_experts_per_tok": 1},
    "tied": {"tie_word_embeddings": True},
    "without_bias": {"attention_bias": False},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path, build_model):
    expected = saved(tmp_path, hf.GptOssConfig(**{**CONFIG, **CASES[case]}), hf.GptOssForCausalLM)
    built = ours(build_model, tmp_path, GptOss)
    assert expected.abs().max() > 1  # peaked enough to show an error
    assert all(layer.sinks.abs().min() > 0 for layer in built.ctx.layers)
    torch.testing.assert_close(built.logits(IDS), expected, atol=TOLERANCE, rtol=1e-5)


def test_layers_alternate_between_window_and_all_where_the_config_does_not_say(tmp_path, build_model):
    saved(tmp_path, hf.GptOssConfig(**CONFIG), hf.GptOssForCausalLM)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    layers = ours(build_model, tmp_path, GptOss).ctx.layers
    assert [(layer.group, layer.window) for layer in layers] == [("sliding", 5), ("full", None), ("sliding", 5)]


def test_rotation_and_windows_are_those_of_transformers_where_the_config_does_not_say():
    given = hf.GptOssConfig()
    config = json.loads(given.to_json_string(use_diff=False)) | {"rope_parameters": None, "layer_types": None}
    del config["sliding_window"]
    mine = GptOss.read_config(config)
    assert {**mine.rope.options, "rope_type": mine.rope.rope_type, "rope_theta": mine.rope.theta} == {
        **given.rope_parameters
    }
    assert mine.windows[:2] == (128, None)
    assert mine.qkv_bias and mine.out_bias and mine.head_dim == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_experts_load_as_transformers_expands_them(dtype, tmp_path, build_model):
    sizes = CONFIG | {"hidden_size": 64, "intermediate_size": 32}
    saved(tmp_path, hf.GptOssConfig(**sizes), hf.GptOssForCausalLM)
    stored = load_file(tmp_path / "model.safetensors")
    expanded, random = dict(stored), torch.Generator().manual_seed(3)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape  # the input first
        shape = (experts, rows, columns // 32)
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        stored[f"{name}_scales"] = torch.randint(121, 124, shape, dtype=torch.uint8, generator=random)
        expanded[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=dtype)
    save_file(stored, tmp_path / "model.safetensors")
    oracle = hf.GptOssForCausalLM(hf.GptOssConfig(**sizes, attn_implementation="eager")).eval()
    oracle.load_state_dict(expanded)
    with torch.no_grad():
        expected = oracle(IDS[None]).logits[0]
    edits = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    built = ours(build_model, tmp_path, GptOss, **edits)
    torch.testing.assert_close(built.logits(IDS), expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not built yet, 1.702 is. Use a checkpoint"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a number above 0, got 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method='fp8' is not built yet"),
        ({"quantization_config": "mxfp4"}, "quantization_config must be an object, got 'mxfp4'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9, but there are 6 experts"),
        ({"mlp_bias": True}, "mlp_bias=true is unknown to this family"),
    ],
)
def test_configs_that_would_change_the_output_are_refused(edits, message, build_model):
    with pytest.raises(CheckpointError, match=message):
        build_model(GptOss, {**CONFIG, **edits}, DummySource(torch.float32, torch.device("cpu"), 0))


def test_the_older_name_for_experts_of_a_token_counts(build_model):
    config = {k: v for k, v in CONFIG.items() if k != "num_experts_per_tok"} | {"experts_per_token": 2}
    source = DummySource(torch.float32, torch.device("cpu"), 0)
    assert build_model(GptOss, config, source).model.mixture.routing.k == 2
