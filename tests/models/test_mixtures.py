"""Families with mixtures of experts against transformers: float32 logits, layouts of checkpoints, refusals."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from framework.errors import CheckpointError
from framework_loaders.dummy import DummySource
from framework_models.mixtral import Mixtral
from framework_models.olmoe import Olmoe
from framework_models.qwen2_moe import Qwen2Moe
from framework_models.qwen3_moe import Qwen3Moe

from .comparing import IDS, SIZES, TOLERANCE, ours, saved

SPARSE = SIZES | {"num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN2 = SPARSE | {"num_experts": 6, "shared_expert_intermediate_size": 28}
FAMILIES = {
    "mixtral": (Mixtral, hf.MixtralConfig, hf.MixtralForCausalLM, SPARSE | {"num_local_experts": 6}),
    "olmoe": (Olmoe, hf.OlmoeConfig, hf.OlmoeForCausalLM, SPARSE | {"num_experts": 6, "head_dim": 8}),
    "qwen2": (Qwen2Moe, hf.Qwen2MoeConfig, hf.Qwen2MoeForCausalLM, QWEN2),
    "qwen3": (Qwen3Moe, hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, SPARSE | {"num_experts": 6}),
}
DEEP = {"num_hidden_layers": 4}
WINDOWS = {**DEEP, "sliding_window": 5, "use_sliding_window": True}
CASES = {
    "mixtral": {},
    "mixtral_window": {"sliding_window": 5},
    "mixtral_one_expert_a_token": {"num_experts_per_tok": 1},
    "mixtral_all_experts": {"num_experts_per_tok": 6},
    "olmoe": {},
    "olmoe_normalised": {"norm_topk_prob": True, "attention_bias": True},
    "qwen2": {},
    "qwen2_normalised_and_tied": {"norm_topk_prob": True, "tie_word_embeddings": True},
    "qwen2_without_bias": {"qkv_bias": False},
    "qwen2_every_other_layer": {**DEEP, "decoder_sparse_step": 2},
    "qwen2_windows": WINDOWS,
    "qwen2_windows_in_some": {**WINDOWS, "max_window_layers": 2},
    "qwen3": {},
    "qwen3_normalised": {"norm_topk_prob": True, "attention_bias": True},
    "qwen3_some_dense_layers": {**DEEP, "mlp_only_layers": [0, 2]},
    "qwen3_windows": WINDOWS,
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES[case.split("_")[0]]
    expected = saved(tmp_path, config_class(**{**sizes, **CASES[case]}), model_class)
    found = ours(build_model, tmp_path, target).logits(IDS)
    assert expected.abs().max() > 1  # peaked enough to show an error
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


def test_experts_are_known_by_their_layer_and_dense_layers_are_not(tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES["qwen3"]
    saved(tmp_path, config_class(**{**sizes, **DEEP, "mlp_only_layers": [0, 2]}), model_class)
    built = ours(build_model, tmp_path, target)
    assert list(built.ctx.experts) == ["model.layers.1.mlp", "model.layers.3.mlp"]
    built.logits(IDS)
    assert [experts.counts.sum().item() for experts in built.ctx.experts.values()] == [3 * len(IDS)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_load_as_well(family, tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES[family]
    expected = saved(tmp_path, config_class(**sizes), model_class)
    stored = load_file(tmp_path / "model.safetensors")
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for layer in range(2):
        prefix = f"model.layers.{layer}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}.experts"
        parts = {
            name: torch.stack([stored.pop(f"{prefix}.{e}.{name}.weight") for e in range(6)])
            for name in (gate, up, down)
        }
        stored[f"{prefix}.gate_up_proj"] = torch.cat((parts[gate], parts[up]), 1)
        stored[f"{prefix}.down_proj"] = parts[down]
    save_file(stored, tmp_path / "model.safetensors")
    torch.testing.assert_close(ours(build_model, tmp_path, target).logits(IDS), expected, atol=TOLERANCE, rtol=1e-5)


def test_mixtral_loads_by_the_names_that_transformers_has_in_memory(tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES["mixtral"]
    expected = saved(tmp_path, config_class(**sizes), model_class)
    model = model_class.from_pretrained(tmp_path)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in model.state_dict())
    built = ours(build_model, tmp_path, target)
    assert list(built.ctx.experts) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    torch.testing.assert_close(built.logits(IDS), expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_moved_together_with_their_router_rows_change_nothing(family, tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES[family]
    expected = saved(tmp_path, config_class(**sizes), model_class)
    order, stored, moved = [4, 2, 0, 5, 1, 3], load_file(tmp_path / "model.safetensors"), {}
    for name, tensor in stored.items():
        head, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, _, tail = rest.partition(".")
            name = f"{head}.experts.{order.index(int(number))}.{tail}"
        moved[name] = tensor[order].contiguous() if name.endswith((".mlp.gate.weight", "moe.gate.weight")) else tensor
    save_file(moved, tmp_path / "model.safetensors")
    torch.testing.assert_close(ours(build_model, tmp_path, target).logits(IDS), expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_in_use_that_the_config_leaves_out_is_the_familys(family, build_model):
    target, _, _, sizes = FAMILIES[family]
    source = DummySource(torch.float32, torch.device("cpu"), 0)
    config = {**sizes, "use_sliding_window": True}
    layers = build_model(target, config, source, max_model_len=5000).ctx.layers
    assert layers[0].window == 4096


class _InBfloat16:
    def __init__(self, plan):
        self.plan = plan

    def forward(self, layer, q, k, v):
        return self.plan.forward(layer, q, k, v).to(q.dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_stays_in_float32_beside_bfloat16(family, tmp_path, build_model):
    """Of all experts none is chosen otherwise by rounding, so that logits stay near; their routers do not round."""
    target, config_class, model_class, sizes = FAMILIES[family]
    expected = saved(tmp_path, config_class(**{**sizes, "num_experts_per_tok": 6}), model_class)
    built = ours(build_model, tmp_path, target, dtype=torch.bfloat16)
    built.plans[:] = [_InBfloat16(plan) for plan in built.plans]
    found = built.logits(IDS)
    assert found.dtype == torch.bfloat16
    # 8 bits of mantissa through a few layers: some per cent of the largest logit
    assert (found.float() - expected).abs().max() < 0.06 * expected.abs().max()


@pytest.mark.parametrize(
    ("family", "edits", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok=7, but there are 6 experts .num_local_experts"),
        ("mixtral", {"num_local_experts": None}, "config.json has no 'num_local_experts'"),
        ("mixtral", {"attention_bias": True}, "attention_bias=true is unknown to this family"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not built yet"),
        ("olmoe", {"sliding_window": 8}, "sliding_window=8 is not built yet"),
        ("qwen2", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
        ("qwen2", {"shared_expert_intermediate_size": None}, "has no 'shared_expert_intermediate_size'"),
        ("qwen3", {"num_experts": None}, "config.json has no 'num_experts'"),
        ("qwen3", {"mlp_only_layers": [9]}, r"mlp_only_layers must list layers below num_hidden_layers=2, got \[9\]"),
        ("qwen3", {"mlp_only_layers": 1}, "mlp_only_layers must list layers below num_hidden_layers=2, got 1"),
        ("qwen3", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1, got 0"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8.* is not built yet"),
    ],
)
def test_configs_that_do_not_fit_are_refused_by_name(family, edits, message, build_model):
    target, _, _, sizes = FAMILIES[family]
    with pytest.raises(CheckpointError, match=message):
        build_model(target, {**sizes, **edits}, DummySource(torch.float32, torch.device("cpu"), 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_expert_is_named(family, tmp_path, build_model):
    target, config_class, model_class, sizes = FAMILIES[family]
    saved(tmp_path, config_class(**sizes), model_class)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(stored) if ".experts.4." in name)
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor '{name}' .* is missing"):
        ours(build_model, tmp_path, target)
