"""Observers hear the engine's events; one that raises is dropped and named."""

import logging
import sys
from importlib.metadata import EntryPoint

import pytest

from framework.config import ComponentConfig, Config
from framework.plugins import ComponentSpec, EventBus, Registry, hookimpl
from framework.runs.plugins import component_lines


class Listens:
    """Notes what it hears; takes fewer arguments than the event has."""

    def __init__(self):
        self.heard = []

    @hookimpl
    def on_request_finished(self, output):
        self.heard.append(output)

    @hookimpl
    def on_step_end(self, stats):
        self.heard.append(stats)


class Raises:
    calls = 0

    @hookimpl
    def on_step_end(self, stats):
        self.calls += 1
        raise KeyError("lost")


@pytest.fixture
def observers(monkeypatch):
    module = type(sys)("observers")
    module.listens, module.raises = Listens(), Raises()
    monkeypatch.setitem(sys.modules, "observers", module)
    return module


@pytest.fixture
def bus(observers):
    names = ("raises", "listens")
    return Registry.load(EntryPoint(name, f"observers:{name}", "framework.plugins") for name in names).events


def test_observer_gets_the_arguments_it_names(bus, observers):
    bus.emit("on_request_finished", "request", "output")
    assert observers.listens.heard == ["output"]


def test_observer_that_raises_is_dropped_and_named_once(bus, observers, caplog):
    with caplog.at_level(logging.ERROR, "framework"):
        bus.emit("on_step_end", 1)
        bus.emit("on_step_end", 2)
    assert observers.raises.calls == 1
    assert observers.listens.heard == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "observer ?:raises raised in on_step_end and is dropped"
    ]


def test_emitter_can_ask_whether_anybody_listens(bus):
    assert bus.has("on_step_end") and not bus.has("on_request_added")
    assert not EventBus().has("on_step_end")


def test_event_that_is_not_there_is_our_own_bug(bus):
    with pytest.raises(KeyError):
        bus.emit("on_step_begin", 1)


class Watches:
    """An observer of kind `observer`: built once, with the methods that it needs."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.heard = []

    def on_request_finished(self, request, output):
        self.heard.append((request, output))


class Deaf:
    """Hears nothing."""


class Misspelt:
    def on_step_ended(self, stats): ...


class Breaks:
    def __init__(self):
        raise RuntimeError("no disk")


class Announces:
    """Announces one observer, `x`."""

    def __init__(self, target, **more):
        self.spec = ComponentSpec("observer", "x", target, **more)

    @hookimpl
    def framework_components(self):
        return [self.spec]


@pytest.fixture
def announced(observers):
    """Registry with an observer of that class, and with a hook that listens."""

    def load(target, **more):
        observers.kind, observers.Watches = Announces(target, **more), Watches
        observers.Deaf, observers.Misspelt, observers.Breaks = Deaf, Misspelt, Breaks
        return Registry.load(EntryPoint(n, f"observers:{n}", "framework.plugins") for n in ("kind", "listens"))

    return load


def test_announced_observer_is_shown_as_active(announced):
    config = Config(backend=ComponentConfig("cpu"), attention=ComponentConfig("cpu"))
    lines = [line.split() for line in component_lines(announced("observers:Watches"), config)]
    assert [(line[1], line[-1]) for line in lines if line[0] == "observer"] == [("x", "active")]


def test_announced_observer_is_built_once_when_the_bus_is_asked_for(announced, monkeypatch):
    monkeypatch.setattr(Watches, "made", 0)
    found = announced("observers:Watches")
    assert Watches.made == 0 and found.failures == []
    assert found.events is found.events and Watches.made == 1
    (heard,) = [o.function.__self__.heard for o in found.events._observers["on_request_finished"][1:]]
    found.events.emit("on_request_finished", "request", "output")
    assert heard == [("request", "output")]
    assert len(found.events._observers["on_step_end"]) == 1  # the hook alone


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("observers:Breaks", "RuntimeError: no disk"),
        ("observers:Absent", "observer 'x' of ? ? points at 'observers:Absent', which is not there"),
        ("absent_module:X", "No module named 'absent_module'"),
        ("observers:Deaf", "has none of the methods on_request_added, on_step_end, on_step, on_request_finished"),
        ("observers:Misspelt", "has a method 'on_step_ended', but there is no such event. Did you mean 'on_step_end'?"),
    ],
)
def test_observer_that_cannot_be_built_is_named_and_the_others_hear(announced, observers, caplog, target, reason):
    found = announced(target)
    found.events.emit("on_step_end", 1)
    assert observers.listens.heard == [1]
    (failure,) = found.failures
    assert failure.reason == f"observer/x cannot be built: {reason}"
    assert f"plugin x of ? ?: {failure.reason}" in caplog.text


def test_observer_with_options_is_left_out_since_no_key_sets_them(announced):
    (failure,) = announced("observers:Watches", config="observers:Options").failures
    assert "observer/x announces config='observers:Options', but no key sets options" in failure.reason
