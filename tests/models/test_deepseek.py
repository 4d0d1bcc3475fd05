"""DeepSeek V2 and V3 against transformers: logits, what is kept of a token, and which configs are refused."""

import re
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from framework.engine.outline import layers_of
from framework.errors import CheckpointError
from framework.interfaces import Checkpoint
from framework.layers import ops
from framework.layers.moe import SparseMLP
from framework_loaders.dummy import DummySource
from framework_loaders.safetensors import SafetensorsLoader
from framework_models.deepseek_v2 import DeepseekV2
from framework_models.deepseek_v3 import DeepseekV3

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-3,
    "max_position_embeddings": 64, "initializer_range": 0.25,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8,
    "beta_slow": 0.5, "mscale": 0.707, "mscale_all_dim": 1.3,
}  # fmt: skip
IDS = torch.tensor([3, 17, 95, 0, 41, 41, 8, 60, 22, 5, 77, 31, 90, 2, 13, 64, 50, 7])
TOLERANCE = 1e-4
"""float32 against float32 with another order of sums; logits reach about 20."""
GROUPS = {"n_group": 4, "topk_group": 2}
V2_CASES = {
    "greedy": {},
    "low_rank_queries": {"q_lora_rank": 12},
    "groups": {"topk_method": "group_limited_greedy", **GROUPS},
    "yarn": {"rope_parameters": YARN},
    "yarn_without_mscale": {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "biases": {"q_lora_rank": 12, "attention_bias": True},
    "biases_but_of_whole_queries": {"attention_bias": True},
    "dense": {"first_k_dense_replace": 3},
    "sparse": {"first_k_dense_replace": 0},
    "tied": {"tie_word_embeddings": True},
}
V3_CASES = {
    "groups": GROUPS,
    "one_group": {"n_group": 1, "topk_group": 1},
    "low_rank_queries": {"q_lora_rank": 12, **GROUPS},
    "not_normalised": {"norm_topk_prob": False, **GROUPS},
    "yarn": {"rope_parameters": YARN, **GROUPS},
    "halves": {"rope_interleave": False, **GROUPS},
    "biases": {"q_lora_rank": 12, "attention_bias": True, **GROUPS},
}
FAMILIES = {
    "v2": (DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV2),
    "v3": (DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV3),
}


def saved(folder, name, edits):
    """The transformers model of a family, with random norms, biases and router biases."""
    make_config, make_model, _ = FAMILIES[name]
    torch.manual_seed(5)
    model = make_model(make_config(**{**SIZES, **edits})).float().eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith(("bias", "e_score_correction_bias")) or "norm" in key:
                value.add_(torch.randn_like(value) * 0.3)
    model.save_pretrained(folder)
    return model


def ours(build_model, folder, name, dtype=torch.float32):
    loader = SafetensorsLoader({})
    checkpoint = loader.checkpoint(folder)
    source = loader.open(checkpoint, dtype=dtype, device=torch.device("cpu"), seed=0)
    built = build_model(FAMILIES[name][2], checkpoint.config, source, dtype=dtype)
    assert source.unused() == []
    source.close()
    return built


@pytest.mark.parametrize(
    ("name", "edits"),
    [*(("v2", case) for case in V2_CASES.values()), *(("v3", case) for case in V3_CASES.values())],
    ids=[*(f"v2-{case}" for case in V2_CASES), *(f"v3-{case}" for case in V3_CASES)],
)
@torch.no_grad()
def test_logits_equal_transformers(name, edits, tmp_path, build_model):
    model = saved(tmp_path, name, edits)
    expected = model(IDS[None]).logits[0]
    found = ours(build_model, tmp_path, name).logits(IDS)
    assert expected.abs().max() > 1  # peaked enough to show an error
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


class Keeps:
    """A plan that keeps the latents of each layer."""

    def __init__(self, plan):
        self.plan, self.latents = plan, {}

    def forward_latent(self, layer, q, latent, up):
        self.latents[layer] = latent
        return self.plan.forward_latent(layer, q, latent, up)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_what_is_kept_of_a_token_equals_the_cache_of_transformers(name, tmp_path, build_model):
    cache = saved(tmp_path, name, {**GROUPS, "rope_parameters": YARN})(IDS[None], use_cache=True).past_key_values
    built = ours(build_model, tmp_path, name)
    plan = built.plans[0] = built.plans[1] = built.plans[2] = Keeps(built.plans[0])
    built.run(IDS)
    for index, latents in plan.latents.items():
        layer = cache.layers[index]
        rotated = layer.values[0, 0]
        if name == "v2":  # whose cache keeps rotated pairs beside each other
            rotated = torch.cat((rotated[:, ::2], rotated[:, 1::2]), dim=1)
        expected = torch.cat((layer.keys[0, 0], rotated), dim=1)
        torch.testing.assert_close(latents, expected, atol=TOLERANCE, rtol=1e-5)
    assert len(plan.latents) == 3


class Takes(Keeps):
    """One that takes what is projected, by the definition of `interfaces.TakesLatentProjections`."""

    def forward_latent_projections(self, layer, q, latent, rotation, norm, up):
        cos, sin = rotation.table.index_select(0, rotation.positions).split(1, dim=1)
        rank = latent.shape[1] - cos.shape[-1]
        nope = q.shape[2] - cos.shape[-1]
        q = torch.cat((q[..., :nope], ops.rotate(q[..., nope:], cos, sin)), -1)
        key = ops.rotate(latent[:, None, rank:], cos, sin)[:, 0]
        return self.forward_latent(
            layer, q, torch.cat((ops.rms_norm(latent[:, :rank], norm.weight, norm.eps), key), 1), up
        )


@pytest.mark.parametrize(("name", "edits"), [("v2", {}), ("v3", {"q_lora_rank": 12, **GROUPS})], ids=("v2", "v3"))
@torch.no_grad()
def test_plan_that_normalises_and_rotates_by_itself_gets_what_is_projected(name, edits, tmp_path, build_model):
    saved(tmp_path, name, {**edits, "rope_parameters": YARN})
    built = ours(build_model, tmp_path, name)
    expected = built.logits(IDS)
    taking = Takes(built.plans[0])
    built.plans[:] = [taking] * 3
    torch.testing.assert_close(built.logits(IDS), expected, atol=1e-5, rtol=1e-5)
    assert len(taking.latents) == 3


@torch.no_grad()
def test_bfloat16_logits_stay_near_float32(tmp_path, build_model):
    """Of dense layers: a token that gets another expert for a rounding is another token."""
    expected = saved(tmp_path, "v3", {**GROUPS, "q_lora_rank": 12, "first_k_dense_replace": 3})(IDS[None]).logits[0]
    built = ours(build_model, tmp_path, "v3", dtype=torch.bfloat16)
    built.plans[:] = [InBfloat16(plan) for plan in built.plans]
    found = built.logits(IDS)
    assert found.dtype == torch.bfloat16
    # 8 bits of mantissa through three layers: a few per cent of the largest logit
    assert (found.float() - expected).abs().max() < 0.06 * expected.abs().max()


class InBfloat16:
    def __init__(self, plan):
        self.plan = plan

    def forward_latent(self, layer, q, latent, up):
        return self.plan.forward_latent(layer, q, latent, up).to(q.dtype)


def test_layers_are_declared_as_one_latent_a_token(build_model):
    layers = dummy(build_model, "v2", {}).ctx.layers
    assert [(x.kind, x.group, x.num_heads, x.num_kv_heads, x.head_dim, x.value_dim) for x in layers] == [
        ("latent", "latent", 4, 1, 32, 24)
    ] * 3
    assert layers[0].scale == pytest.approx(18**-0.5)


def dummy(build_model, name, edits):
    source = DummySource(torch.float32, torch.device("cpu"), 3)
    return build_model(FAMILIES[name][2], {**SIZES, **edits}, source)


@pytest.mark.parametrize(
    ("edits", "sparse"),
    [
        ({"first_k_dense_replace": 2, "num_hidden_layers": 4}, [2, 3]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_hidden_layers": 6}, [2, 4]),
        ({"n_routed_experts": None}, []),
    ],
    ids=["behind_dense_ones", "every_second", "none"],
)
def test_layers_with_experts_follow_the_config(edits, sparse, build_model):
    layers = dummy(build_model, "v2", edits).model.stack.layers
    assert [i for i, layer in enumerate(layers) if isinstance(layer.mlp, SparseMLP)] == sparse


def test_layers_that_predict_further_tokens_are_left_out_and_others_are_not(build_model):
    model = dummy(build_model, "v3", {**GROUPS, "num_nextn_predict_layers": 1}).model
    ignored = lambda name: any(re.search(pattern, name) for pattern in model.ignored_weights)  # noqa: E731
    assert ignored("model.layers.3.eh_proj.weight") and ignored("model.layers.3.mlp.experts.0.up_proj.weight")
    assert not ignored("model.layers.2.eh_proj.weight") and not ignored("model.layers.30.eh_proj.weight")


@pytest.mark.parametrize(
    ("name", "edits", "message"),
    [
        ("v2", {"kv_lora_rank": None}, "config.json has no 'kv_lora_rank'"),
        ("v2", {"v_head_dim": 0}, "v_head_dim must be a whole number of at least 1, got 0"),
        ("v2", {"q_lora_rank": "low"}, "q_lora_rank must be a whole number of at least 1, got 'low'"),
        ("v2", {"num_key_value_heads": 2}, "num_key_value_heads=2 with num_attention_heads=4: in latent attention"),
        ("v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not served. Served: greedy, group_limited_gre"),
        ("v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not served. Served: softmax"),
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob=true: for this family implementations differ"),
        ("v2", {"mlp_bias": True}, "mlp_bias=true is unknown to this family"),
        ("v2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8.* is not built yet"),
        ("v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "n_group=3, topk_group=1 and"),
        ("v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8.* is not built yet"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not served. Served: sigmoid"),
        ("v3", {"topk_method": "greedy"}, "topk_method='greedy' is not served. Served: noaux_tc"),
        ("v3", {"n_group": 8, "topk_group": 4}, "n_group=8, topk_group=4 .* groups are of one size, at least 2"),
        ("v3", {"n_group": 4, "topk_group": 1}, "num_experts_per_tok=3 do not fit n_routed_experts=8"),
        ("v3", {"n_group": 2, "topk_group": 3}, "n_group=2, topk_group=3 and"),
        ("v3", {"routed_scaling_factor": "much"}, "routed_scaling_factor must be a number above 0, got 'much'"),
        ("v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a whole number of at least 0"),
        ("v3", {"rope_interleave": "yes"}, "rope_interleave must be true or false, got 'yes'"),
    ],
)
def test_config_that_would_be_ignored_is_refused(name, edits, message, build_model):
    with pytest.raises(CheckpointError, match=message):
        dummy(build_model, name, edits)


COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "ep_size": 1, "hidden_act": "silu",
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "seq_aux": True,
    "tie_word_embeddings": False, "use_cache": True, "v_head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
SCALED = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
PUBLISHED = {
    "v2": {
        "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "rope_scaling": SCALED | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "v3": {
        "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "rope_scaling": SCALED | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "scale"), [("v2", 0.1147214), ("v3", 0.1352338)])
def test_published_configs_are_served(name, scale):
    """V2-Lite, and V3 once its quantisation is taken away: scores are scaled by (0.1 m ln 40 + 1)^2 / sqrt(192)."""
    checkpoint = Checkpoint(Path("none"), "dummy", COMMON | PUBLISHED[name])
    layers = layers_of(name, FAMILIES[name][2], checkpoint, torch.bfloat16, 4096, lambda tensor: True)
    heads = PUBLISHED[name]["num_attention_heads"]
    assert len(layers) == PUBLISHED[name]["num_hidden_layers"]
    assert {(layer.num_heads, layer.head_dim, layer.value_dim) for layer in layers} == {(heads, 576, 512)}
    assert layers[0].scale == pytest.approx(scale, abs=1e-7)
