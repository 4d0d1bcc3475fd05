"""Weights that are made up (`engine.load_format=dummy`), for every family: a head is where the family has one of its
own, and a model whose head is its embedding does not say its last token again."""

import json

import pytest
import torch
import transformers

from framework.plugins import registry
from framework_loaders.dummy import DummyLoader
from framework_models.generic.model import TransformersModel

from .generic_checkpoints import ARCHITECTURES, make

IDS = torch.arange(48).roll(7)
FAMILIES = [
    s for s in registry().specs("model") if s.target.startswith("framework_models.") and s.name != "transformers"
]


def made_up(build_model, folder, target, config):
    """(logits of IDS, names of the tensors that the model took)."""
    (folder / "config.json").write_text(json.dumps(config))
    loader, taken = DummyLoader({}), []
    checkpoint = loader.checkpoint(folder)
    source = loader.open(checkpoint, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    take = source.take
    source.take = lambda name, *words: taken.append(name) or take(name, *words)
    with torch.inference_mode():
        return build_model(target, checkpoint.config, source).logits(IDS), taken


def repeated(logits):
    """The share of tokens that the model would say again."""
    return (logits.argmax(-1) == IDS).float().mean().item()


@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: spec.name)
def test_families(spec, tied, tmp_path, build_model):
    target = registry().load_target("model", spec.name)
    default = getattr(transformers, *spec.provides).config_class().tie_word_embeddings
    for case in registry().load_cases(spec)():
        config = {key: value for key, value in case.config.items() if key != "tie_word_embeddings"}
        logits, taken = made_up(
            build_model, tmp_path, target, config if tied is None else {**config, "tie_word_embeddings": tied}
        )
        assert any(name.endswith("lm_head.weight") for name in taken) != (default if tied is None else tied)
        assert repeated(logits) < 0.2  # by chance 1 in 61; of a head that finds its embedding, nearly all


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_of_the_generic_path(name, tmp_path, build_model):
    config = {**make(name, tie_word_embeddings=True).config.to_dict(), "architectures": [ARCHITECTURES[name][0]]}
    logits, taken = made_up(build_model, tmp_path, TransformersModel, config)
    assert not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in taken)
    assert repeated(logits) < 0.2
