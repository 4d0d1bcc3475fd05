"""Random weights: their laws, and that a tensor depends on seed and name only."""

import json

import pytest
import torch

from framework_loaders.dummy import DummyLoader


def opened(tmp_path, seed=0, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    loader = DummyLoader({})
    return loader.open(loader.checkpoint(tmp_path), dtype=torch.float32, device=torch.device("cpu"), seed=seed)


def test_values_follow_the_rule_of_their_name(tmp_path):
    source = opened(tmp_path)
    assert torch.equal(source.take("model.layers.0.input_layernorm.weight", (8,)), torch.ones(8))
    assert torch.equal(source.take("model.layers.0.self_attn.q_norm.weight", (8,)), torch.ones(8))
    assert torch.equal(source.take("model.layers.0.self_attn.q_proj.bias", (8,)), torch.zeros(8))
    # 40,000 draws: the standard deviation of their standard deviation is 0.35 %
    for name, std in (("model.layers.0.mlp.up_proj.weight", 0.02), ("model.embed_tokens.weight", 2.5 / 10),
                      ("lm_head.weight", 2.5 / 10)):  # fmt: skip
        drawn = source.take(name, (400, 100))
        assert abs(drawn.std() / std - 1) < 0.02 and abs(drawn.mean()) < 0.02 * std


def test_a_tensor_depends_on_seed_and_name_and_not_on_the_order(tmp_path):
    first, second, other = opened(tmp_path, 1), opened(tmp_path, 1), opened(tmp_path, 2)
    a, b = first.take("a.weight", (4, 4)), first.take("b.weight", (4, 4))
    assert torch.equal(second.take("b.weight", (4, 4)), b) and torch.equal(second.take("a.weight", (4, 4)), a)
    assert not torch.equal(a, b) and not torch.equal(other.take("a.weight", (4, 4)), a)


@pytest.mark.parametrize("words", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_a_head_is_there_for_those_that_take_it_without_asking(words, tmp_path):
    source = opened(tmp_path, **words)
    assert not source.has("lm_head.weight") and not source.has("language_model.lm_head.weight")
    assert source.has("model.embed_tokens.weight") and source.take("lm_head.weight", (4, 8)).std() > 0


@pytest.mark.parametrize(
    ("name", "values", "factor"), [("LlamaForCausalLM", {-1.0, 1.0}, 1.0), ("Gemma3ForCausalLM", {-2.0, 0.0}, 0.0)]
)
def test_the_final_norm_has_signs(name, values, factor, tmp_path):
    source = opened(tmp_path, architectures=[name])
    for final in ("model.norm", "language_model.model.norm", "model.decoder.final_layer_norm", "transformer.ln_f"):
        assert set(source.take(f"{final}.weight", (64,)).tolist()) == values
    for inner in ("model.layers.0.input_layernorm.weight", "model.layers.0.norm.weight"):
        assert set(source.take(inner, (64,)).tolist()) == {factor}


def test_layer_norms_and_embeddings_of_other_layouts_follow_the_same_rules(tmp_path):
    source = opened(tmp_path)
    assert torch.equal(source.take("transformer.h.0.ln_1.weight", (8,)), torch.ones(8))
    assert torch.equal(source.take("transformer.h.0.ln_1.bias", (8,)), torch.zeros(8))
    assert abs(source.take("transformer.wte.weight", (400, 100)).std() / 0.25 - 1) < 0.02


def test_experts_sinks_and_router_biases_are_drawn_in_the_dtype_asked_for(tmp_path):
    source = opened(tmp_path)
    for name, shape in (("mlp.experts.gate_up_proj", (4, 8, 6)), ("mlp.experts.gate_up_proj_bias", (4, 8)),
                        ("self_attn.sinks", (64,)), ("mlp.gate.e_score_correction_bias", (64,))):  # fmt: skip
        drawn = source.take(name, shape, torch.bfloat16)
        assert drawn.dtype == torch.bfloat16 and 0.005 < drawn.float().std() < 0.05


@pytest.mark.parametrize("end", ["_blocks", "_scales", ".weight_scale_inv"])
def test_quantized_forms_are_not_there(end, tmp_path):
    assert not opened(tmp_path).has(f"model.layers.0.mlp.experts.gate_up_proj{end}")
