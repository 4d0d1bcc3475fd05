"""Observers hear the engine's events; one that raises is dropped and named."""

import logging
import sys
from importlib.metadata import EntryPoint

import pytest

from framework.plugins import EventBus, Registry, hookimpl


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
