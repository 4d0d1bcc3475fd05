"""A component that breaks before it has a case fails a check that says where, and stops no other one."""

import sys
import types

import pytest

from framework.batch import Field
from framework.errors import ConfigError
from framework.interfaces import Capabilities, StageSpec
from framework.plugins import ComponentSpec, registry
from framework.testing.checking import run_check
from framework.testing.kits import suite_of

from .sound_stages import EVERY_WORD, Counting


@pytest.fixture
def plugins(monkeypatch):
    """A registry with the stage `counting`, whose class is what the test says."""

    def registered(target):
        module = types.ModuleType("a_plugin")
        module.Target = target
        monkeypatch.setitem(sys.modules, "a_plugin", module)
        found = registry()
        monkeypatch.setitem(
            found._specs, ("stage", "counting"), ComponentSpec("stage", "counting", "a_plugin:Target", dist="a-plugin")
        )
        return found

    return registered


def with_spec(**changes):
    words = {"kind": "elementwise", "fields": Counting.spec.fields, "extra_args": ("rate",), **changes}
    return type("Counting", (Counting,), {"spec": StageSpec(words.pop("name", "counting"), **words)})


class NoCommit:
    spec = Counting.spec
    __init__, wants, validate = Counting.__init__, Counting.wants, Counting.validate
    add_request, apply = Counting.add_request, Counting.apply


class RaisesWhenBuilt(Counting):
    def __init__(self, options, ctx):
        self.rate = options.rate


class AnswersOnlySome(Counting):
    def wants(self, params):
        return params.extra_args["counting"]["rate"] > 0


class Exits(Counting):
    def __init__(self, options, ctx):
        sys.exit("no licence")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (type("Nothing", (), {}), "Nothing: has no `spec`, a StageSpec that says what it is"),
        (with_spec(kind="elementwize"), "counting: kind 'elementwize' is none of mask, elementwise, threshold"),
        (with_spec(kind="threshold"), "counting: is of kind threshold and lacks bounds; see framework.interfaces"),
        (NoCommit, "counting: is of kind elementwise and lacks commit; see framework.interfaces.SamplerStage"),
        (with_spec(name="count"), "counting: the plugin is announced by this name and its StageSpec says 'count'"),
        (with_spec(fields=(Field("rate", "float16"),)), "counting: field 'rate' has dtype 'float16'; use one of float"),
        (with_spec(caps=Capabilities(keeps=EVERY_WORD | {"asink"})), "'asink' is no word of the capabilities. Did you"),
        (RaisesWhenBuilt, "AttributeError: 'dict' object has no attribute 'rate' (test_kits.py:"),
        (AnswersOnlySome, "TypeError: 'NoneType' object is not subscriptable (test_kits.py:"),
        (Exits, "SystemExit: no licence (test_kits.py:"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_component_that_breaks_at_once_fails_one_check_with_the_reason_and_the_place(plugins, target, text):
    suite = suite_of(plugins(target), "stage", "counting")
    (failing,) = [(check, case) for check, case in suite.checks if check.__name__ == "check_it_can_be_built_and_asked"]
    outcome = run_check(*failing)
    assert outcome.result == "failed" and text in outcome.reason, outcome


def test_stage_whose_parameters_are_not_declared_is_told_what_it_declares(plugins):
    with pytest.raises(
        ConfigError, match=r"Its StageSpec says that it reads params=\(\) and extra_args=\(\): name there"
    ):
        suite_of(plugins(with_spec(extra_args=())), "stage", "counting")


def test_value_that_validate_lets_pass_and_wants_cannot_take_fails_the_check_of_bad_parameters(plugins):
    class PassesAll(Counting):
        def validate(self, params):
            pass

        def wants(self, params):
            return 0 < (params.extra_args or {}).get("counting", {}).get("rate", 0) < 10

    outcomes = {
        one.check: one
        for one in (run_check(*pair) for pair in suite_of(plugins(PassesAll), "stage", "counting").checks[4:8])
    }
    assert "validate accepts extra_args rate=" in outcomes["bad parameters are refused"].reason, outcomes


def test_assertion_of_the_component_itself_is_told_with_its_place():
    def check_something(case):
        case()

    def broken():
        raise AssertionError("what the component asserts")

    outcome = run_check(check_something, broken)
    assert outcome.reason.startswith("what the component asserts (test_kits.py:")
    assert outcome.reason.endswith(" in broken)")
