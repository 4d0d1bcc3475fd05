"""Configs that would change the output in a way that is not built are refused by name, never ignored."""

import pytest
import torch

from framework.errors import CheckpointError
from framework_loaders.dummy import DummySource
from framework_models.gemma2 import Gemma2
from framework_models.gemma3 import Gemma3, Gemma3ForImages
from framework_models.gpt2 import Gpt2
from framework_models.llama import Llama
from framework_models.mistral import Mistral
from framework_models.olmo2 import Olmo2
from framework_models.phi3 import Phi3
from framework_models.qwen2 import Qwen2
from framework_models.qwen3 import Qwen3
from framework_models.smollm3 import SmolLM3

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "max_window_layers": 1,
    "initializer_range": 0.02,
}


def weights():
    return DummySource(torch.float32, torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not served. Served: silu, swish. Use a checkpoint"),
        ({"sliding_window": 8}, "sliding_window=8 is not built yet"),
        ({"layer_types": ["sliding_attention"]}, "layer_types sliding_attention are not built yet"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8.* is not built yet"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not built yet"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0 is not built yet"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not built yet"),
        ({"num_key_value_heads": 3}, "config.json: num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1, got 'many'"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps must be a number in \[0, 1\), got 'small'"),
    ],
)
def test_llama_refuses_what_it_would_otherwise_ignore(edits, message, build_model):
    with pytest.raises(CheckpointError, match=message):
        build_model(Llama, {**CONFIG, **edits}, weights())


CHUNKS = {"chunk_size": 8, "local_size": 2, "original_max_position_embeddings": 8}


def test_dual_chunks_change_nothing_for_requests_of_one_chunk(build_model):
    """As of Qwen2.5-1M, whose chunks are longer than what most engines serve."""
    logits = [
        build_model(Qwen2, {**CONFIG, **edits}, weights(), max_model_len=6).logits(torch.arange(6))
        for edits in ({}, {"dual_chunk_attention_config": CHUNKS})
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({}, r"dual_chunk_attention_config=\{.*\} is not built yet .* chunk of 6 tokens.*is 7\. .*max_model_len=6"),
        ({"local_size": None}, "chunk of 8 tokens"),
        ({"original_max_position_embeddings": 4}, r"chunk of 4 tokens.*Use engine\.max_model_len=4"),
        ({"sparse_attention_enabled": True}, "dual_chunk_attention_config=.*sparse.* is not built yet. Use a checkp"),
        ({"chunk_size": None}, "has no 'chunk_size'"),
        ({"chunk_size": 2, "original_max_position_embeddings": None}, "chunk of 1 tokens"),
    ],
)
def test_dual_chunks_are_refused_where_a_request_may_leave_the_first(edits, message, build_model):
    length = 9 if edits == {"local_size": None} else 7
    with pytest.raises(CheckpointError, match=message):
        build_model(
            Qwen2, {**CONFIG, "dual_chunk_attention_config": {**CHUNKS, **edits}}, weights(), max_model_len=length
        )


def test_qwen3_may_say_that_it_has_norms_of_heads(build_model):
    build_model(Qwen3, {**CONFIG, "use_qk_norm": True}, weights())


def test_a_window_that_is_off_is_none_and_one_that_is_named_without_being_there_is_refused(build_model):
    config = {**CONFIG, "sliding_window": 4096, "use_sliding_window": False}
    assert build_model(Qwen3, config, weights()).ctx.layers[0].window is None
    with pytest.raises(CheckpointError, match="layer_types has sliding_attention, but no sliding_window is on"):
        build_model(Qwen3, {**config, "layer_types": ["sliding_attention"]}, weights())


@pytest.mark.parametrize(
    ("target", "edits", "message"),
    [
        (Qwen2, {"attention_bias": True}, "attention_bias=true is unknown to this family"),
        (Qwen2, {"mlp_bias": True}, "mlp_bias=true is unknown to this family"),
        (Qwen2, {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] is not built yet"),
        (Qwen2, {"use_sliding_window": "no"}, "use_sliding_window must be true or false, got 'no'"),
        (Qwen2, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a whole number of at least"),
        (
            Qwen2,
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": -1},
            "max_window_layers must be a whole number of at least 0, got -1",
        ),
        (Qwen3, {"layer_types": ["full_attention"] * 2}, "layer_types has 2 words for num_hidden_layers=1"),
        (Qwen3, {"layer_types": ["chunked_attention"]}, "layer_types chunked_attention are not built yet"),
        (Qwen3, {"layer_types": 3}, "layer_types must be a list of words, got 3"),
        (Mistral, {"sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types full_attention are not built"),
        (Mistral, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not built yet"),
        (Gemma2, {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not served. Served: gelu_pytorch_tanh"),
        (Gemma2, {"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping must be a number above 0, got -1\.0"),
        (Gemma2, {"query_pre_attn_scalar": "big"}, "query_pre_attn_scalar must be a number above 0, got 'big'"),
        (Gemma2, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not built yet"),
        (Gemma2, {"rope_local_base_freq": 1e4}, r"rope_local_base_freq=10000\.0 is not built yet"),
        (Gemma3, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0 is not built yet"),
        (Gemma3, {"rope_parameters": {"sliding_attention": {}}}, "says nothing of full_attention, only of sliding_att"),
        (Gemma3ForImages, {}, "text_config must be an object with the text model's keys, got None"),
        (Olmo2, {"sliding_window": 4}, "sliding_window=4 is not built yet"),
        (Phi3, {"partial_rotary_factor": 0.3}, "partial_rotary_factor=0.3 rotates 1 of head_dim=4 dimensions"),
        (Llama, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not built yet"),
        (Llama, {"rope_interleaved": True}, "rope_interleaved=True is not built yet"),
        (Qwen3, {"use_qk_norm": False}, "use_qk_norm=False, but Qwen3 always has norms of heads"),
        (SmolLM3, {"no_rope_layers": []}, r"no_rope_layers must hold a 0 or a 1 for each layer, got \[\]"),
    ],
)
def test_families_refuse_what_they_do_not_have(target, edits, message, build_model):
    with pytest.raises(CheckpointError, match=message):
        build_model(target, {**CONFIG, **edits}, weights())


GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"n_head": 3}, "n_embd=16 is no multiple of n_head=3"),
        ({"activation_function": "relu"}, "activation_function='relu' is not served. Served: gelu_new, gelu_pytorch_t"),
        ({"add_cross_attention": True}, "add_cross_attention=true asks for an encoder"),
        (
            {"n_positions": 15},
            "wpe.weight has 15 positions, but max_model_len is 16. Use at most engine",
        ),
        ({"attention_bias": True}, "attention_bias=true is unknown to this family"),
    ],
)
def test_gpt2_refuses_what_it_does_not_have(edits, message, build_model):
    with pytest.raises(CheckpointError, match=message):
        build_model(Gpt2, {**GPT2, **edits}, weights(), max_model_len=16)


def test_keys_without_effect_on_the_output_are_accepted(build_model):
    inert = {"use_cache": True, "attention_dropout": 0.1, "pretraining_tp": 1, "layer_types": ["full_attention"]}
    assert build_model(Llama, {**CONFIG, **inert}, weights()).logits(torch.tensor([1, 2])).shape == (2, 32)


@pytest.mark.parametrize(("target", "windows"), [(Mistral, [4096] * 2), (Gemma2, [4096, None]), (Qwen2, [None] * 2)])
def test_a_window_that_config_json_leaves_out_is_that_of_the_family(target, windows, build_model):
    def found(length, **edits):
        config = {**CONFIG, "num_hidden_layers": 2, **edits}
        return [layer.window for layer in build_model(target, config, weights(), max_model_len=length).ctx.layers]

    assert found(4097) == windows
    assert found(4097, sliding_window=None) == [None] * 2


def test_a_window_that_hides_nothing_is_none(build_model):
    def layer(length):
        return build_model(Mistral, {**CONFIG, "sliding_window": 32}, weights(), max_model_len=length).ctx.layers[0]

    assert (layer(32).group, layer(32).window) == ("full", None)
    assert (layer(33).group, layer(33).window) == ("sliding", 32)
