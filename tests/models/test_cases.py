"""The cases that families are checked with turn on whatever a family has: a key without effect would check nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from framework.discovery import OURS
from framework.errors import FrameworkError
from framework.plugins import registry
from framework.testing.model_bench import Built, ModelCase, tokens

FAMILIES = [spec for spec in registry().specs("model") if spec.dist == OURS]
ALWAYS = {"architectures", "model_type", "vocab_size", "max_position_embeddings", "tie_word_embeddings"}
"""What a case needs, what engines read, and what a check of its own turns on and off."""
ACTIVATIONS = {"hidden_act", "hidden_activation", "activation_function"}
"""A family serves one, under several names."""
LEFT_OUT = {
    "gemma3": {"sliding_window_pattern", "rope_local_base_freq"},  # by layer_types, rope_parameters; see gemma3_images
    "gemma3_images": {"layer_types"},
    "gpt_oss": {"attention_bias", "quantization_config", "swiglu_alpha"},  # on by default, MXFP4, one value
    "qwen2": {"layer_types"},  # by max_window_layers; so in the next ones
    "qwen2_moe": {"layer_types"},
    "qwen3": {"layer_types", "use_qk_norm"},  # the norms are always on
    "qwen3_moe": {"num_local_experts", "use_qk_norm"},  # num_experts is one name of the two
    "smollm3": {"layer_types"},
}
"""Keys that a family knows and that no case has, with the reason."""


def made(case: ModelCase) -> Any:
    """All that a config decides: layers, weights, what is left out, logits of random weights."""
    built = Built(case)
    logits = built.logits(*tokens(5, built.vocab_size))
    return built.ctx.layers, built.weights.taken, built.model.ignored_weights, logits.tolist()


def without_each(case: ModelCase) -> Iterator[tuple[str, ModelCase]]:
    """(key, the case without it); keys of a text model as well."""
    for key in case.config.keys() - ALWAYS - ACTIVATIONS:
        yield key, case.with_config(**{key: None})
    text = case.config.get("text_config", {})
    for key in text:
        yield key, case.with_config(text_config={name: value for name, value in text.items() if name != key})


@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: spec.name)
def test_each_key_of_a_case_changes_the_model_or_is_needed(spec: Any) -> None:
    for case in registry().load_cases(spec)():
        whole, without_effect = made(case), []
        for key, other in without_each(case):
            with suppress(FrameworkError):  # it is needed
                if made(other) == whole:
                    without_effect.append(key)
        assert not without_effect, f"{case.name}: {without_effect}"


@pytest.mark.parametrize("spec", [s for s in FAMILIES if s.name != "transformers"], ids=lambda spec: spec.name)
def test_each_key_that_a_family_knows_is_in_a_case(spec: Any) -> None:
    cases = registry().load_cases(spec)()
    given = {key for case in cases for key in (*case.config, *case.config.get("text_config", {}))}
    assert set(cases[0].target.family.knows) - given == LEFT_OUT.get(spec.name, set())


def test_generic_path_has_a_case_of_each_kind_of_layer() -> None:
    (spec,) = [spec for spec in FAMILIES if spec.name == "transformers"]
    layers = [layer for case in registry().load_cases(spec)() for layer in Built(case).ctx.layers]
    assert {layer.kind for layer in layers} == {"full", "sliding"}
    assert {layer.softcap for layer in layers} == {None, 5.0}
    assert {isinstance(layer.sinks, torch.Tensor) for layer in layers} == {True, False}
