"""What tells one engine's KV from another's: engines that share a store must not take each other's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from framework.engine.connecting import check_connector, connector_of, kv_identity
from framework.errors import ConfigError, PluginError
from framework.interfaces import KVGroup, KVSpec, LayerSpec

SPECS = [KVSpec((2, -1, 4, 8), torch.float32, 0)]


@pytest.fixture
def choice(tmp_path):
    """choice(**changes) -> what `kv_identity` reads of an engine's choice; a dotted name is written with __."""
    (tmp_path / "weights").write_bytes(b"1")

    def make(**changes):
        made = SimpleNamespace(
            checkpoint=SimpleNamespace(location=str(tmp_path), format="safetensors", config={"hidden_size": 8}),
            config=SimpleNamespace(engine=SimpleNamespace(seed=None, batch_invariant=False)),
            model=SimpleNamespace(name="llama"),
            backend=SimpleNamespace(name="cpu", dtype=torch.float32),
            attention=SimpleNamespace(name="cpu"),
            block_size=4,
        )
        for path, value in changes.items():
            *owners, name = path.split("__")
            owner = made
            for one in owners:
                owner = getattr(owner, one)
            setattr(owner, name, value)
        return made

    return make


def test_same_engine_has_the_same_identity(choice):
    assert kv_identity(choice(), SPECS) == kv_identity(choice(), SPECS)


@pytest.mark.parametrize(
    "change",
    [
        {"attention__name": "other"},
        {"model__name": "other"},
        {"backend__name": "other"},
        {"backend__dtype": torch.bfloat16},
        {"config__engine__batch_invariant": True},
        {"block_size": 8},
        {"checkpoint__config": {"hidden_size": 16}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_bytes_of_kv_changes_the_identity(choice, change):
    assert kv_identity(choice(**change), SPECS) != kv_identity(choice(), SPECS)


def test_length_counts_where_it_chooses_how_keys_are_rotated(choice):
    for rope, is_same in (
        ({"rope_type": "yarn"}, True),
        ({"rope_type": "longrope"}, False),
        ({"type": "longrope"}, False),
    ):
        config = {"hidden_size": 8, "rope_scaling": rope}
        one, other = (choice(checkpoint__config=config, max_model_len=length) for length in (64, 128))
        assert (kv_identity(one, SPECS) == kv_identity(other, SPECS)) is is_same


def test_layout_of_the_memory_and_the_weights_are_part_of_it(choice, tmp_path):
    before = kv_identity(choice(), SPECS)
    assert kv_identity(choice(), [replace(SPECS[0], dtype=torch.float16)]) != before
    (tmp_path / "weights").write_bytes(b"12")
    assert kv_identity(choice(), SPECS) != before


def test_seed_counts_where_it_makes_the_weights(choice):
    for weights, is_same in (("safetensors", True), ("dummy", False)):
        one, other = (choice(checkpoint__format=weights, config__engine__seed=seed) for seed in (1, 2))
        assert (kv_identity(one, SPECS) == kv_identity(other, SPECS)) is is_same


ONE, TWO = [KVGroup("a")], [KVGroup("a"), KVGroup("b")]
LAYERS = [LayerSpec(i, "g", 4, 2, 16, 0.25) for i in range(2)]


class Whole:
    layerwise = False


class Layerwise:
    layerwise = True


class AsToldByOptions:
    @classmethod
    def is_layerwise(cls, options):
        return options


def part(target, options=None):
    return SimpleNamespace(name="wire", target=target, options=options)


@pytest.mark.parametrize("window", [None, 8])
def test_connector_beside_layers_with_a_window_is_refused_by_both_names(window):
    layers = [replace(LAYERS[0], window=w) for w in (None, window)]
    check_connector(None, "gemma", layers, TWO)
    if window is None:
        check_connector(part(Whole), "gemma", layers, TWO)
        return
    with pytest.raises(
        ConfigError, match=r"kv_connector=wire moves .* model=gemma has layers of window 8, .*connector=none"
    ):
        check_connector(part(Whole), "gemma", layers, ONE)


@pytest.mark.parametrize(("target", "options"), [(Layerwise, None), (AsToldByOptions, True)])
def test_layerwise_connector_of_several_groups_is_refused_by_both_names(target, options):
    check_connector(part(target, options), "llama", LAYERS, ONE)
    with pytest.raises(ConfigError, match="kv_connector=wire moves KV layer by layer, and model=llama has 2 KV groups"):
        check_connector(part(target, options), "llama", LAYERS, TWO)


@pytest.mark.parametrize(("target", "options"), [(Whole, None), (AsToldByOptions, False)])
def test_connector_of_whole_steps_goes_with_any_number_of_groups(target, options):
    check_connector(part(target, options), "llama", LAYERS, TWO)


@pytest.mark.parametrize("layerwise", [None, "yes"])
def test_class_that_does_not_say_whether_it_is_layerwise_is_refused_by_name(layerwise):
    target = type("Silent", (), {} if layerwise is None else {"layerwise": layerwise})
    with pytest.raises(
        PluginError, match=rf"kv_connector=wire: .* layerwise \(layerwise={layerwise!r}\).*in the class"
    ):
        check_connector(part(target), "llama", LAYERS, ONE)


def test_connector_that_is_not_what_its_class_says_is_closed_and_refused_by_name(choice):
    closed = []

    class Changes(Whole):
        def __init__(self, options, ctx):
            self.layerwise = True

        def close(self):
            closed.append(self)

    plugins = SimpleNamespace(spec=lambda *_: None, label=lambda _: "wire")
    with pytest.raises(PluginError, match="kv_connector=wire: its class says layerwise=False, and once it is built"):
        connector_of(choice(connector=part(Changes)), plugins, ONE, SPECS, 4)
    assert len(closed) == 1
