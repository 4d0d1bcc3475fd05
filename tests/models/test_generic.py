"""`model=transformers` by itself: logits, layers that it reads off, weights of any source, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from framework.engine.outline import layers_of
from framework.errors import CheckpointError, NotBuiltError
from framework_loaders.dummy import DummySource
from framework_loaders.safetensors import SafetensorsLoader
from framework_models.generic.model import TransformersModel

from .generic_checkpoints import ARCHITECTURES, MAX_LEN, SIZES, make

IDS = torch.tensor([3, 17, 95, 0, 41, 41, 8, 60, 22, 5, 77, 31, 90, 2, 13, 64, 50, 7])
TOLERANCE = 1e-4  # float32, the same code but for attention; logits reach about 6


def opened(folder):
    loader = SafetensorsLoader({})
    checkpoint = loader.checkpoint(folder)
    return checkpoint, loader.open(checkpoint, dtype=torch.float32, device=torch.device("cpu"), seed=0)


def outline(folder):
    """The layers that are known before weights are read."""
    checkpoint, source = opened(folder)
    return layers_of("transformers", TransformersModel, checkpoint, torch.float32, MAX_LEN, source.has)


def ours(build_model, folder, **words):
    checkpoint, source = opened(folder)
    built = build_model(TransformersModel, checkpoint.config, source, **words)
    left, ignored = source.unused(), built.model.ignored_weights
    source.close()
    assert left == [], ignored
    return built


def saved(name, folder, **edits):
    model = make(name, **edits)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDS[None]).logits[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers(name, tmp_path, build_model):
    expected = saved(name, tmp_path)
    with torch.inference_mode():
        found = ours(build_model, tmp_path, max_model_len=MAX_LEN).logits(IDS)
    assert expected.abs().max() > 1  # peaked enough to show an error
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_are_the_same_without_weights(name, tmp_path, build_model):
    saved(name, tmp_path)
    assert outline(tmp_path) == ours(build_model, tmp_path, max_model_len=MAX_LEN).ctx.layers


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cohere2", [("sliding_9", 9), ("sliding_9", 9), ("sliding_9", 9), ("full", None)]),
        ("starcoder2", [("sliding_9", 9)] * 2),
        ("stablelm", [("full", None)] * 2),
    ],
)
def test_windows_are_those_of_the_masks(name, wanted, tmp_path, build_model):
    saved(name, tmp_path)
    layers = ours(build_model, tmp_path).ctx.layers
    assert [(layer.group, layer.window) for layer in layers] == wanted


def test_a_window_as_long_as_the_longest_request_is_none(tmp_path, build_model):
    saved("starcoder2", tmp_path)
    assert [layer.window for layer in ours(build_model, tmp_path, max_model_len=9).ctx.layers] == [None, None]


def test_scale_soft_cap_and_sinks_are_read_off(tmp_path, build_model):
    saved("gemma2", tmp_path / "gemma2", query_pre_attn_scalar=64)
    saved("gpt_oss", tmp_path / "gpt_oss")
    capped, sunk = (ours(build_model, tmp_path / name).ctx.layers for name in ("gemma2", "gpt_oss"))
    assert [(layer.scale, layer.softcap) for layer in capped] == [(0.125, 5.0)] * 2
    assert all(layer.sinks.shape == (4,) and layer.sinks.abs().max() > 0 for layer in sunk)


def test_values_narrower_than_keys_are_filled_up(tmp_path, build_model):
    saved("latent", tmp_path)
    assert [layer.head_dim for layer in ours(build_model, tmp_path).ctx.layers] == [16, 16]


def test_a_checkpoint_of_the_base_model_lacks_its_prefix(tmp_path, build_model):
    expected = saved("stablelm", tmp_path, tie_word_embeddings=True)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    with torch.inference_mode():
        found = ours(build_model, tmp_path).logits(IDS)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)


def test_a_missing_tensor_is_named(tmp_path, build_model):
    saved("stablelm", tmp_path)
    checkpoint, source = opened(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.2.*is missing"):
        build_model(TransformersModel, {**checkpoint.config, "num_hidden_layers": 3}, source)


def test_it_takes_dummy_weights(build_model):
    config = {**make("stablelm").config.to_dict(), "architectures": ["StableLmForCausalLM"]}
    built = build_model(TransformersModel, config, DummySource(torch.float32, torch.device("cpu"), 1))
    with torch.inference_mode():
        logits = built.logits(IDS)
    assert logits.isfinite().all() and logits.std() > 1


def test_tokens_in_any_order_and_company_have_their_own_positions(tmp_path, build_model):
    """Two sequences, side by side: a plan that keeps them apart gives what each has alone."""
    saved("stablelm", tmp_path)
    built = ours(build_model, tmp_path)
    alone = [built.run(ids).hidden for ids in (IDS[:7], IDS[7:])]

    class Apart:
        def forward(self, layer, q, k, v):
            return torch.cat([built.plans[layer].forward(layer, q[s], k[s], v[s]) for s in (slice(7), slice(7, 18))])

    from framework.interfaces import ForwardContext

    positions = torch.cat((torch.arange(7), torch.arange(11)))
    both = built.model.forward(built.model.embed(IDS), positions, ForwardContext([Apart(), Apart()])).hidden
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-5, rtol=1e-5)


REFUSED = {
    "no_interface": ("FalconForCausalLM", {}, "does not call its attention through transformers' attention interface"),
    "state": ("MambaForCausalLM", {}, "carries a state from token to token"),
    "convolution": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"]},
        "calls an attention function 1 times in 2 layers",
    ),
    "mask": ("DogeForCausalLM", {}, "makes masks of its own"),
    "twice": ("DiffLlamaForCausalLM", {}, "calls an attention function 4 times in 2 layers"),
    "quantized": ("LlamaForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
    "encoder": ("LlamaForCausalLM", {"is_encoder_decoder": True}, "is an encoder with a decoder"),
    "chunks": (
        "Llama4ForCausalLM",
        {"attention_chunk_size": 8, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
        "has no part 'language_model'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_right_is_refused_by_name(case, build_model):
    import transformers

    architecture, edits, message = REFUSED[case]
    own = {key: value for key, value in edits.items() if key != "quantization_config"}
    words = {key: value for key, value in SIZES.items() if value is not None}
    config = getattr(transformers, architecture).config_class(**{**words, **own}).to_dict()
    config = {**config, **edits, "architectures": [architecture]}
    source = DummySource(torch.float32, torch.device("cpu"), 1)
    with pytest.raises(NotBuiltError, match=f"model=transformers: {architecture} {message}.*write a model plugin"):
        build_model(TransformersModel, config, source)


@pytest.mark.parametrize(
    "mixes", [lambda x: x + x.roll(1, 1), lambda x: x + torch.arange(x.shape[1])[:, None]], ids=["tokens", "order"]
)
def test_a_model_that_mixes_tokens_beside_its_attention_is_found_out(mixes, tmp_path, build_model, monkeypatch):
    from transformers.models.stablelm.modeling_stablelm import StableLmMLP

    saved("stablelm", tmp_path)
    plain = StableLmMLP.forward
    monkeypatch.setattr(StableLmMLP, "forward", lambda self, x: plain(self, mixes(x)))
    with pytest.raises(NotBuiltError, match="mixes tokens, or counts positions, outside of its attention function"):
        ours(build_model, tmp_path)


def causal(row, column):
    return column <= row


HIDDEN_BEYOND_8 = {
    "window": lambda row, column: (column <= row) & (column > row - 8),
    "chunks": lambda row, column: (column <= row) & (column // 8 == row // 8),
    "blocks": lambda row, column: (column <= row) & ((row < 8) | (column // 8 % 2 == 0)),
}
"""Masks that are causal for 8 tokens, and something else for more."""


@pytest.fixture
def masked(monkeypatch):
    """A function that gives the layers of StableLM the masks that another one makes of what transformers' is given."""
    from transformers.models.stablelm import modeling_stablelm

    plain = modeling_stablelm.create_causal_mask
    return lambda made: monkeypatch.setattr(modeling_stablelm, "create_causal_mask", lambda **w: made(plain, w))


@pytest.mark.parametrize("pattern", [*HIDDEN_BEYOND_8.values(), causal], ids=[*HIDDEN_BEYOND_8, "causal"])
def test_masks_that_a_model_makes_by_itself_are_refused_whatever_a_few_tokens_see_of_them(
    pattern, masked, tmp_path, build_model
):
    def made(plain, words):
        places = torch.arange(words["inputs_embeds"].shape[1], device=words["inputs_embeds"].device)
        return pattern(places[:, None], places)[None, None]

    saved("stablelm", tmp_path)
    masked(made)
    with pytest.raises(NotBuiltError, match="StableLmForCausalLM makes masks of its own, which the generic path"):
        ours(build_model, tmp_path)
    with pytest.raises(NotBuiltError, match="makes masks of its own"):
        outline(tmp_path)


@pytest.mark.parametrize("kind", ["chunks", "blocks"])
def test_patterns_that_are_causal_for_a_few_tokens_alone_are_refused(kind, masked, tmp_path, build_model):
    pattern = HIDDEN_BEYOND_8[kind]
    saved("stablelm", tmp_path)
    masked(lambda plain, words: plain(**words, and_mask_function=lambda b, h, row, column: pattern(row, column)))
    with pytest.raises(NotBuiltError, match="has a mask that is neither causal nor a sliding window"):
        ours(build_model, tmp_path)


def test_patterns_that_long_requests_alone_would_get_are_found_before_weights_are_read(masked, tmp_path):
    def made(plain, words):
        pattern = HIDDEN_BEYOND_8["chunks"] if words["inputs_embeds"].shape[1] > 8 else causal
        return plain(**words, and_mask_function=lambda b, h, row, column: pattern(row, column))

    saved("stablelm", tmp_path)
    masked(made)
    with pytest.raises(NotBuiltError, match="has a mask that is neither causal nor a sliding window"):
        outline(tmp_path)


def test_a_model_that_attends_twice_in_one_layer_is_refused(tmp_path, build_model, monkeypatch):
    from transformers.models.stablelm.modeling_stablelm import StableLmModel

    saved("stablelm", tmp_path)
    plain = StableLmModel.__init__

    def shared(self, config):
        plain(self, config)
        self.layers[1] = self.layers[0]

    monkeypatch.setattr(StableLmModel, "__init__", shared)
    with pytest.raises(NotBuiltError, match="attends twice in one layer"):
        ours(build_model, tmp_path)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (
            {"hidden_act": "none_such"},
            r"config.json makes no Starcoder2For.* \(KeyError: 'none_such'\)\. Correct it",
        ),
        (
            {"layer_types": ["none_such"]},
            r"config.json makes no Starcoder2For.* \(.*layer_types.*\)\. Correct it",
        ),
        ({"num_attention_heads": 3}, "3 heads of queries are no multiple of 2 heads of keys. Correct config.json"),
    ],
)
def test_a_config_that_makes_no_model_is_an_error_with_its_reason(edits, message, build_model):
    config = {**make("starcoder2").config.to_dict(), "architectures": ["Starcoder2ForCausalLM"], **edits}
    source = DummySource(torch.float32, torch.device("cpu"), 1)
    with pytest.raises(CheckpointError, match=message):
        build_model(TransformersModel, config, source)


@pytest.mark.parametrize("name", ["NoSuchForCausalLM", "LlamaModel"])
def test_an_architecture_that_is_no_causal_language_model_is_refused(name, build_model):
    source = DummySource(torch.float32, torch.device("cpu"), 1)
    with pytest.raises(CheckpointError, match=f"transformers 5.* has no causal language model {name}"):
        build_model(TransformersModel, {"architectures": [name]}, source)


def test_code_that_a_checkpoint_names_is_never_run_and_its_architecture_decides(tmp_path, build_model):
    expected = saved("stablelm", tmp_path)
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('run')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_x.XConfig", "AutoModelForCausalLM": "modeling_x.StableLmForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        found = ours(build_model, tmp_path).logits(IDS)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)
    message = (
        r"has no causal language model XForCausalLM\. Code that .*\(auto_map=\{.*\}\) is never run; write a plugin"
    )
    with pytest.raises(CheckpointError, match=message):
        build_model(TransformersModel, {**config, "architectures": ["XForCausalLM"]}, opened(tmp_path)[1])


def test_frequencies_that_follow_the_batch_are_served_as_far_as_they_stay(tmp_path, build_model):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5], "long_factor": [4.0]}
    rope["original_max_position_embeddings"] = 32
    expected = saved("stablelm", tmp_path, rope_parameters=rope)
    with torch.inference_mode():
        found = ours(build_model, tmp_path, max_model_len=32).logits(IDS)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-5)
    with pytest.raises(CheckpointError, match=r"'longrope' .* up to 32 tokens, and max_model_len is 33.*Use"):
        ours(build_model, tmp_path, max_model_len=33)


@pytest.mark.parametrize("name", ["stablelm", "gpt_oss", "opt"])
def test_hidden_states_of_layers_are_those_of_transformers(name, tmp_path, build_model):
    model = make(name)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        wanted = model(IDS[None], output_hidden_states=True).hidden_states
        built = ours(build_model, tmp_path)
        output = built.run(IDS, feature_layers=(1, 0, 2))
    torch.testing.assert_close(output.features[0], wanted[1][0], atol=TOLERANCE, rtol=1e-5)
    torch.testing.assert_close(output.features[1], wanted[0][0], atol=TOLERANCE, rtol=1e-5)
    torch.testing.assert_close(output.hidden, wanted[2][0], atol=TOLERANCE, rtol=1e-5)  # which is behind the norm
    assert output.features[2].shape == output.hidden.shape and not torch.equal(output.features[2], output.hidden)
    assert built.run(IDS).features == ()


def test_bfloat16_weights_that_stay_in_float32_do(tmp_path, build_model):
    saved("latent", tmp_path)
    loader = SafetensorsLoader({})
    checkpoint = loader.checkpoint(tmp_path)
    source = loader.open(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    model = build_model(TransformersModel, checkpoint.config, source, dtype=torch.bfloat16).model
    state = model._causal.state_dict()
    assert json.dumps(sorted({str(t.dtype) for t in state.values()})) == '["torch.bfloat16", "torch.float32"]'
    assert state["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
