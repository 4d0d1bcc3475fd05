"""A plugin is taken for what the model's layers are, and a choice that does not serve them is refused by both names."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch

from framework.engine.attending import check_layers, unfit, unserved
from framework.engine.choice import Part
from framework.errors import ConfigError, PluginError
from framework.interfaces import AttentionCaps, LayerSpec
from framework.plugins import ComponentSpec, Registry, hookimpl

PLAIN, WINDOWS, LATENT = AttentionCaps(), AttentionCaps(window=True), AttentionCaps(latent=True)
SIZED = AttentionCaps(head_dims=(64,))


def layer(**fields):
    return LayerSpec(
        **{"index": 0, "group": "g", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 1, **fields}
    )


@pytest.fixture
def plugins(monkeypatch):
    """Three attention plugins, the plainest of the highest priority."""
    module = type(sys)("made_up_attention")
    caps = {"plain": PLAIN, "windows": WINDOWS, "latent": LATENT}
    names = list(caps)
    specs = [
        ComponentSpec("attention", name, f"made_up_attention:{name}", priority=9 - i, provides=("cpu",))
        for i, name in enumerate(names)
    ]
    module.plugin = SimpleNamespace(framework_components=hookimpl(lambda: specs))
    for name in names:
        setattr(module, name, SimpleNamespace(caps=caps[name]))
    monkeypatch.setitem(sys.modules, "made_up_attention", module)
    return Registry.load([EntryPoint("mine", "made_up_attention:plugin", "framework.plugins")])


@pytest.mark.parametrize(
    "caps, fields, what",
    [
        (PLAIN, {}, None),
        (PLAIN, {"window": 8}, "sliding windows"),
        (WINDOWS, {"window": 8}, None),
        (PLAIN, {"softcap": 30.0}, "soft caps of scores"),
        (AttentionCaps(softcap=True), {"softcap": 30.0}, None),
        (PLAIN, {"sinks": torch.zeros(4)}, "attention sinks"),
        (AttentionCaps(sinks=True), {"sinks": torch.zeros(4)}, None),
        (SIZED, {}, "head_dim 16"),
        (SIZED, {"head_dim": 64}, None),
        (PLAIN, {"value_dim": 8}, "latent attention"),
        (LATENT, {"value_dim": 8}, None),
        (LATENT, {}, "layers that are not latent"),
    ],
)
def test_capability_that_a_layer_needs_is_named_when_it_is_missing(caps, fields, what):
    assert unserved(caps, [layer(**fields)]) == what


def test_every_layer_counts():
    assert unserved(PLAIN, [layer(), layer(window=8)]) == "sliding windows"


@pytest.mark.parametrize(
    "fields, name", [({}, "plain"), ({"window": 8}, "windows"), ({"value_dim": 8}, "latent")], ids=str
)
def test_auto_takes_the_best_that_serves_the_layers(plugins, fields, name):
    assert plugins.auto("attention", "cpu", unfit(plugins, [layer(**fields)])).name == name


def test_auto_tells_of_each_plugin_why_it_does_not_serve(plugins):
    with pytest.raises(
        PluginError, match="plain: it does not serve attention sinks, which the model has; windows: it "
    ):
        plugins.auto("attention", "cpu", unfit(plugins, [layer(sinks=torch.zeros(4))]))


def check(plugins, name, **fields):
    part = Part(name, plugins.load_target("attention", name), None)
    check_layers(part, "gemma", [layer(**fields)], plugins, "cpu")


def test_named_plugin_that_serves_is_taken(plugins):
    check(plugins, "windows", window=8)


def test_refusal_names_both_sides_and_a_plugin_that_serves(plugins):
    text = "attention=plain does not serve sliding windows, which model=gemma has. Use attention=windows"
    with pytest.raises(ConfigError, match=text):
        check(plugins, "plain", window=8)


def test_refusal_says_when_nothing_serves(plugins):
    with pytest.raises(ConfigError, match=r"soft caps of scores, .* No attention plugin that can be used here does"):
        check(plugins, "windows", softcap=30.0)
