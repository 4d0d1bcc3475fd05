"""`run=plugins`: what loads and what does not, what is not installed, how to check a plugin."""

import importlib
import sys

import pytest

from framework.config import ComponentConfig, Config
from framework.plugins import ComponentSpec, Registry, hookimpl
from framework.runs import plugins


@pytest.fixture
def found(monkeypatch):
    """A registry with a third party's components: one that loads, one that cannot be imported, one without a module."""
    module = type(sys)("shaky")

    class Shaky:
        @hookimpl
        def framework_components(self):
            return [
                ComponentSpec("stage", "fine", "shaky:Fine"),
                ComponentSpec("stage", "raises", "raises_on_import:Stage"),
                ComponentSpec("stage", "lacks", "lacks_a_module:Stage", extra="fast"),
            ]

    module.plugin, module.Fine = Shaky(), object()
    monkeypatch.setitem(sys.modules, "shaky", module)
    whole = importlib.import_module

    def import_module(name, *args):
        if name == "raises_on_import":
            raise RuntimeError("libshaky is\n too old")
        if name == "lacks_a_module":
            raise ModuleNotFoundError("No module named 'xgrammar'", name="xgrammar")
        return whole(name, *args)

    monkeypatch.setattr("framework.plugins.importlib.import_module", import_module)
    from importlib.metadata import EntryPoint, entry_points

    ours = entry_points(group="framework.plugins")
    return Registry.load([*ours, EntryPoint("shaky", "shaky:plugin", "framework.plugins")])


def test_component_that_does_not_load_is_broken_with_its_reason(found):
    lines = {line.split()[1]: " ".join(line.split()) for line in plugins.component_lines(found, Config())}
    assert lines["fine"].endswith("1.0 usable")
    assert lines["raises"].endswith("broken: RuntimeError: libshaky is too old")
    assert "broken: stage 'lacks' of ? ? needs the module 'xgrammar'. Install it with: pip install" in lines["lacks"]
    assert lines["gumbel"].endswith("1.0 active")


def test_plugin_of_hooks_alone_is_listed_with_them():
    class Tally:
        @hookimpl
        def on_request_finished(self, output):
            """Hears it."""

    found = Registry.load([])
    found._manager.register(Tally(), "tally:tally")
    assert plugins.hook_lines(found) == ["", "hooks:", "  tally:tally: on_request_finished"]
    assert plugins.hook_lines(Registry.load()) == []


def test_chosen_connector_is_active():
    config = Config(kv_connector=ComponentConfig("memory"))
    assert ("kv_connector", "memory") in plugins.active_components(Registry.load(), config)


def test_components_of_a_third_party_come_with_the_command_that_checks_them(found):
    names = [f"  python -m framework check stage/{name}" for name in ("fine", "lacks", "raises")]
    assert plugins.check_lines(found) == ["", "to check:", *names]
    assert plugins.check_lines(Registry.load()) == []


def test_what_is_not_installed_is_listed_by_extra(found, monkeypatch):
    required = ["torch>=2", "one>=1; extra == 'a'", 'two; platform_system == "Linux" and extra == "b"',
                "one; extra == 'every'", "two; extra == 'every'", "pytest; extra == 'c'"]  # fmt: skip
    monkeypatch.setattr(plugins.metadata, "requires", lambda dist: required if dist == "framework" else None)
    assert plugins.missing_lines(found)[2:] == [
        "  one: pip install 'framework[a]'", "  two: pip install 'framework[b]'",
    ]  # fmt: skip
