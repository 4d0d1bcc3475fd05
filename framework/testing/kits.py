"""Which kinds have a contract suite, and the cases that a component is checked with.

A component names its own cases in `ComponentSpec.cases`; for most kinds they can be derived. Adding a kind is one entry
of `KITS`. Called by `run=check` and the pytest plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch

from framework.config import compose
from framework.errors import CheckpointError, ConfigError, PluginError
from framework.interfaces import Backend
from framework.plugins import ComponentSpec, Registry
from framework.testing import (
    attention_suite,
    backends,
    connector,
    grammars,
    loaders,
    models,
    observers,
    policies,
    schedulers,
    stages,
)
from framework.testing.attention_suite import AttentionPlugin
from framework.testing.backend_case import backend_here
from framework.testing.checking import Check
from framework.testing.components import COMPONENT_CHECKS, Announced
from framework.testing.connector import ConnectorCase
from framework.testing.loaders import LoaderCase
from framework.testing.model_bench import ModelCase
from framework.testing.model_engine import ENGINE_CHECKS
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

    PluginError for one that is not there or cannot be used, ConfigError where no case can be found. One that raises
    before it has any case fails a check of its own in the place of its kind's.
    """
    spec = plugins.spec(kind, name)
    announced = Announced(plugins, spec)
    checks: list[tuple[Check, Any]] = [(check, announced) for check in COMPONENT_CHECKS]
    try:
        plugins.load_target(kind, name)
        checks += [(check, case) for case in _cases(plugins, spec) for check in KITS[kind].checks]
    except (ConfigError, PluginError):
        raise
    except (Exception, SystemExit) as error:
        checks.append((_failing_with(error), announced))
    return Suite(spec, "cases derived from its contract" if spec.cases is None else f"cases {spec.cases}", checks)


def _failing_with(error: BaseException) -> Check:
    def check_it_can_be_built_and_asked(_: Announced) -> None:
        raise error

    return check_it_can_be_built_and_asked


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
    target, options = plugins.load_target("stage", spec.name), plugins.build_options("stage", spec.name, values)
    stages.check_it_is_a_stage(StageCase(target, (), (), options))
    assert target.spec.name == spec.name, (
        f"{spec.name}: the plugin is announced by this name and its StageSpec says '{target.spec.name}'."
        " Give the ComponentSpec and the StageSpec one name"
    )
    return [derived(target, options)]


def _plain(case: Callable[[Any, Any], Any]) -> Callable[[Registry, ComponentSpec], list[Any]]:
    """Cases of a kind that needs nothing but the component and its default options."""

    def derive(plugins: Registry, spec: ComponentSpec) -> list[Any]:
        return [case(plugins.load_target(spec.kind, spec.name), plugins.build_options(spec.kind, spec.name, {}))]

    return derive


def _observer(plugins: Registry, spec: ComponentSpec) -> list[observers.ObserverCase]:
    return [observers.ObserverCase(plugins.load_target("observer", spec.name))]


def _attention(plugins: Registry, spec: ComponentSpec) -> list[AttentionPlugin]:
    """On the backend that `backend=auto` takes here."""

    def backend(dtype: torch.dtype) -> Backend:
        return backend_here(plugins, str(dtype).removeprefix("torch."))

    options = plugins.build_options("attention", spec.name, {})
    return [AttentionPlugin(plugins.load_target("attention", spec.name), backend, options)]


def _connector(plugins: Registry, spec: ComponentSpec) -> list[ConnectorCase]:
    raise ConfigError(
        f"kv_connector/{spec.name}: options of connectors that hold nothing yet cannot be guessed. Give its"
        " ComponentSpec cases='package.module:CASES', ConnectorCases of framework.testing.connector"
    )


def _loader(plugins: Registry, spec: ComponentSpec) -> list[LoaderCase]:
    """A crafted folder, which is of the right format for some."""
    case = loaders.crafted(plugins.load_target("loader", spec.name), plugins.build_options("loader", spec.name, {}))
    with TemporaryDirectory() as folder:
        try:
            case.checkpoint(folder)
        except CheckpointError as error:
            raise ConfigError(
                f"loader/{spec.name} reads no folder of safetensors. Give its ComponentSpec"
                " cases='package.module:CASES', LoaderCases of framework.testing.loaders"
            ) from error
    return [case]


def _model(plugins: Registry, spec: ComponentSpec) -> list[ModelCase]:
    raise ConfigError(
        f"model/{spec.name}: the config.json of a tiny checkpoint cannot be guessed. Give its ComponentSpec"
        " cases='package.module:CASES', ModelCases of framework.testing.model_bench"
    )


KITS: dict[str, Kit] = {
    "stage": Kit(StageCase, (*stages.CHECKS, check_engine_gives_equal_tokens), _stage),
    "scheduler": Kit(schedulers.SchedulerCase, schedulers.CHECKS, _plain(schedulers.SchedulerCase)),
    "policy": Kit(policies.PolicyCase, policies.CHECKS, _plain(policies.PolicyCase)),
    "attention": Kit(AttentionPlugin, attention_suite.CHECKS, _attention),
    "model": Kit(ModelCase, (*models.CHECKS, *ENGINE_CHECKS), _model),
    "kv_connector": Kit(ConnectorCase, connector.CHECKS, _connector),
    "loader": Kit(LoaderCase, loaders.CHECKS, _loader),
    "grammar": Kit(grammars.GrammarCase, grammars.CHECKS, _plain(grammars.GrammarCase)),
    "observer": Kit(observers.ObserverCase, observers.CHECKS, _observer),
    "backend": Kit(backends.BackendCase, backends.CHECKS, _plain(backends.BackendCase)),
}
"""{kind: its suite}."""
