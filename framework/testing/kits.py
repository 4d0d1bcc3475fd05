"""Which kinds have a contract suite, and the cases that a component is checked with.

A component names its own cases in `ComponentSpec.cases`; for most kinds they can be derived. Adding a kind is one entry
of `KITS`. Called by `run=check` and the pytest plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from framework.config import compose
from framework.errors import ConfigError
from framework.plugins import ComponentSpec, Registry
from framework.testing import stages
from framework.testing.checking import Check
from framework.testing.components import COMPONENT_CHECKS, Announced
from framework.testing.stage_bench import StageCase
from framework.testing.stage_derive import derived
from framework.testing.stage_engine import check_engine_gives_equal_tokens


@dataclass(frozen=True)
class Kit:
    """The suite of one kind. case: the class of its cases; derive: cases of a component that names none."""

    case: type
    checks: Sequence[Check]
    derive: Callable[[Registry, ComponentSpec], Sequence[Any]]


@dataclass(frozen=True)
class Suite:
    """What is to run for one component: checks with the case that each takes. origin: where its cases come from."""

    spec: ComponentSpec
    origin: str
    checks: Sequence[tuple[Check, Any]]


def suite_of(plugins: Registry, kind: str, name: str) -> Suite:
    """Everything that is checked of a component.

    PluginError for one that is not there or cannot be used, ConfigError where no case can be found.
    """
    spec = plugins.spec(kind, name)
    plugins.load_target(kind, name)
    cases = _cases(plugins, spec)
    announced = Announced(plugins, spec)
    checks: list[tuple[Check, Any]] = [(check, announced) for check in COMPONENT_CHECKS]
    checks += [(check, case) for case in cases for check in KITS[kind].checks]
    return Suite(spec, "cases derived from its contract" if spec.cases is None else f"cases {spec.cases}", checks)


def _cases(plugins: Registry, spec: ComponentSpec) -> Sequence[Any]:
    kit, named = KITS[spec.kind], plugins.load_cases(spec)
    if named is None:
        return kit.derive(plugins, spec)
    made = named() if callable(named) and not isinstance(named, kit.case) else named
    cases = [made] if isinstance(made, kit.case) else list(made)
    wrong = [case for case in cases if not isinstance(case, kit.case)]
    if wrong or not cases:
        what = f"{wrong[0]!r} among them" if wrong else "none"
        raise ConfigError(f"{spec.kind}/{spec.name}: {spec.cases} must hold {kit.case.__name__}s, and holds {what}")
    return cases


def _stage(plugins: Registry, spec: ComponentSpec) -> list[StageCase]:
    """With the options that its YAML file gives it, where it has one."""
    try:
        config = compose([f"+sampler/stage={spec.name}"])
        values = next(dict(s.options) for s in config.sampler.stages if s.name == spec.name)
    except ConfigError:  # the check of its YAML file says what is wrong with it
        values = {}
    options = plugins.build_options("stage", spec.name, values)
    return [derived(plugins.load_target("stage", spec.name), options)]


KITS: dict[str, Kit] = {
    "stage": Kit(StageCase, (*stages.CHECKS, check_engine_gives_equal_tokens), _stage),
}
"""{kind: its suite}."""
