"""What stands around a component is checked as well: its announcement, its YAML file, its options; and observers."""

import sys

import pytest
import torch

from framework.plugins import ComponentSpec, registry
from framework.testing import components, observers, stage_courses
from framework.testing.checking import Skipped, run_check
from framework.testing.components import COMPONENT_CHECKS, Announced
from framework.testing.stages import StageCase

from .sound_stages import Counting, Floor, paying


def announced(kind="stage", name="xtc", target="framework_samplers.xtc:Xtc", **words):
    return Announced(registry(), ComponentSpec(kind, name, target, **words))


def failures(case):
    return {
        one.check: one.reason
        for one in (run_check(check, case) for check in COMPONENT_CHECKS)
        if one.result == "failed"
    }


def test_sound_component_passes():
    assert failures(announced(config="framework_samplers.options:XtcConfig")) == {}


def test_options_that_import_torch_are_named():
    found = failures(announced(config="framework.testing.stages:StageCase"))
    assert "imports torch" in found["announcing imports no torch"]


def test_options_that_only_this_process_finds_are_not_said_to_import_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "only_here", sys.modules[__name__])
    case = Announced(registry(), ComponentSpec("stage", "xtc", "x:Y", config="only_here:Options"))
    outcome = run_check(components.check_announcing_imports_no_torch, case)
    assert outcome.reason == (
        "stage/xtc: another process cannot announce it: ModuleNotFoundError: No module named 'only_here'"
    )


def test_component_without_a_yaml_file_is_named():
    found = failures(announced(name="nowhere"))
    assert "+sampler/stage=nowhere does not compose" in found["yaml file selects it"]


def test_options_that_are_accepted_and_ignored_are_named(monkeypatch):
    spec = announced("kv_connector", "memory", "x:Y", config="framework_connectors.options:MemoryOptions")
    monkeypatch.setattr(components, "compose", lambda words: None)
    found = failures(spec)
    assert found["unknown option is refused"] == "kv_connector/memory: kv_connector.no_such_option=1 is accepted"
    assert "is accepted" in found["option of a wrong type is refused"]


def test_kind_that_no_word_selects_has_no_yaml_to_check():
    with pytest.raises(Skipped, match="components of kind loader have no YAML file"):
        components.check_yaml_file_selects_it(announced("loader", "gguf", "framework_loaders.gguf:GgufLoader"))


class Hears:
    def on_request_added(self, request):
        pass


class WantsArguments(Hears):
    def __init__(self, options):
        pass


class HearsNothing:
    pass


class TakesTooLittle:
    def on_request_finished(self, request):
        pass


class MeansAnotherEvent(Hears):
    def on_request_ended(self, request, output):
        pass


class Raises(Hears):
    def on_step_end(self, stats):
        raise RuntimeError("full disk")


class Aborts(Hears):
    def on_request_added(self, request):
        request.params = request.params.replace(max_tokens=1)
        request.max_total_tokens = request.num_prompt_tokens + 1


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (WantsArguments, "WantsArguments: is built as WantsArguments()"),
        (HearsNothing, "HearsNothing: has none of on_request_added"),
        (TakesTooLittle, "TakesTooLittle: on_request_finished must take (request, output)"),
        (MeansAnotherEvent, "MeansAnotherEvent: on_request_ended is no event"),
        (Raises, "Raises: raises RuntimeError('full disk'), and an engine drops it for that"),
        (Aborts, "Aborts: tokens depend on who observes"),
    ],
)
def test_faulty_observer_is_named_with_its_fault(target, text):
    outcomes = [run_check(check, observers.ObserverCase(target)) for check in observers.CHECKS]
    assert [one for one in outcomes if one.result == "failed" and one.reason.startswith(text)], outcomes


def test_sound_observer_passes():
    observers.check_observer(observers.ObserverCase(Hears))


@pytest.fixture
def accelerator(monkeypatch):
    """A device that is none: the host under another name, so that columns have a side of their own there."""
    device = torch.device("cpu", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    return device


class OtherThere(Floor):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.is_there = ctx.device.index is not None

    def bounds(self, logits, rows, lo, hi):
        lo, hi = super().bounds(logits, rows, lo, hi)
        return (lo + 1 if self.is_there else lo), hi


def test_device_that_gives_something_else_is_named(accelerator):
    for target, name in ((Counting, "counting"), (Floor, "floor")):
        stage_courses.check_same_on_every_device(StageCase(target, paying(name, 0.5, 2.0)))
    with pytest.raises(AssertionError, match="floor: gives something else on cpu:0 than on the host"):
        stage_courses.check_same_on_every_device(StageCase(OtherThere, paying("floor", 0.5, 2.0)))
