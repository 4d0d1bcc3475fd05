"""No key of a config.json is ignored: each that transformers 5 knows of an architecture is read, or has no effect."""

import re

import pytest
import torch
import transformers

from framework.errors import CheckpointError
from framework.plugins import registry
from framework_loaders.dummy import DummySource

NO_VALUE = "no such value"
WITHOUT_EFFECT = {
    # names, tokens, and what a call returns
    "_name_or_path", "architectures", "model_type", "transformers_version", "dtype", "id2label", "label2id",
    "problem_type", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits",
    # training
    "initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef",
    "router_jitter_noise",
    # the same numbers by other steps
    "chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn",
    # heads of other tasks
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    # images
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    # follow from others, or are the engine's to read
    "qk_head_dim", "_sliding_window_pattern", "max_position_embeddings",
}  # fmt: skip
ALSO = {"per_layer_config", "quantization_config"}  # of any config, and not among its defaults
OWN = {"deepseek_v2": {"head_dim"}, "deepseek_v3": {"head_dim"}}
"""Keys that are another's name in a family: the rotated dimensions, which qk_rope_head_dim says."""

LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
TURNED_ON = (
    {},
    {"use_sliding_window": True, "sliding_window": 4},
    {"no_rope_layers": None},
    {"num_experts": None},
    {"rope_scaling": None},
    {"rope_parameters": LONG},
)
"""Keys beside which another one is read."""

FAMILIES = [
    s for s in registry().specs("model") if s.target.startswith("framework_models.") and s.name != "transformers"
]


def configs_of(spec):
    """Of each case, a function that makes a config with other keys; keys of a text model in both places."""
    for case in registry().load_cases(spec)():
        yield lambda edits, config=case.config: {**config, **edits}
        if text := case.config.get("text_config"):
            yield lambda edits, config=case.config, text=text: {**config, "text_config": {**text, **edits}}


def refuses(build_model, spec, config):
    """What the family says against a config, empty for nothing."""
    target = registry().load_target("model", spec.name)
    try:
        build_model(target, config, DummySource(torch.float32, torch.device("cpu"), 0))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: spec.name)
def test_every_key_that_transformers_knows_of_an_architecture_is_read_or_has_no_effect(spec, build_model):
    defaults = getattr(transformers, *spec.provides).config_class().to_dict()
    keys = {**defaults, **(defaults.get("text_config") or {})}.keys() | ALSO
    for key in sorted(keys - WITHOUT_EFFECT - OWN.get(spec.name, set())):
        edits = [{**others, key: NO_VALUE} for others in TURNED_ON]
        said = [refuses(build_model, spec, edited(e)) for edited in configs_of(spec) for e in edits]
        assert any(re.search(rf"\b{key}\b.*{NO_VALUE}", text) for text in said), key


@pytest.mark.parametrize(
    ("architecture", "edits"),
    [
        ("Qwen2", {"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 2}}),
        ("Llama", {"per_layer_config": {"0": {"num_attention_heads": 2}}}),
        ("Llama", {"attention_chunk_size": 8}),
        ("Llama", {"attention_multiplier": 0.5}),
        ("Llama", {"attn_temperature_tuning": 4}),
        ("Mistral", {"llama_4_scaling": {"beta": 0.1}}),
        ("Qwen3", {"attention_value_scale": 0.7}),
        ("DeepseekV3", {"index_topk": 4}),
        ("GptOss", {"routed_scaling_factor": 2.5}),
        ("GPT2", {"layer_types": ["chunked_attention"] * 2}),
    ],
)
def test_features_of_other_families_and_engines_are_refused_under_an_architecture_that_is_served(
    architecture, edits, build_model
):
    """No class of transformers 5 reads them for these, so that they would change the output of other engines alone."""
    (spec,) = [spec for spec in FAMILIES if spec.provides[0].startswith((f"{architecture}For", f"{architecture}LM"))]
    for edited in configs_of(spec):
        assert next(iter(edits)) in refuses(build_model, spec, edited(edits))
