"""Checks of any component as its plugin announces it: what stands around it, before anything of it runs.

Announcing imports nothing heavy, a YAML file selects it, and wrong options are refused by name. Called by `run=check`,
beside the suite of the component's kind.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from framework.config import COMPONENT_GROUPS, compose
from framework.errors import ConfigError
from framework.plugins import ComponentSpec, Registry
from framework.testing.checking import Skipped

NO_SUCH_OPTION = "no_such_option"
WRONG = "no value of this type"
GROUPS = {kind: group for group, kind in COMPONENT_GROUPS.items()} | {"scheduler": "scheduler", "model": "model"}
"""Config group of a kind; stages have one of their own, and other kinds none."""


@dataclass(frozen=True)
class Announced:
    """A component and the registry that has it."""

    plugins: Registry
    spec: ComponentSpec

    @property
    def name(self) -> str:
        return f"{self.spec.kind}/{self.spec.name}"

    @property
    def word(self) -> str:
        """The word of a command line that selects it. Skipped for a kind that no word selects."""
        if self.spec.kind == "stage":
            return f"+sampler/stage={self.spec.name}"
        if self.spec.kind not in GROUPS:
            raise Skipped(f"components of kind {self.spec.kind} have no YAML file")
        return f"{GROUPS[self.spec.kind]}={self.spec.name}"

    @property
    def prefix(self) -> str:
        """Where its options are."""
        return f"sampler.stages.{self.spec.name}" if self.spec.kind == "stage" else GROUPS[self.spec.kind]

    def options_class(self) -> Any:
        return self.plugins.load_config_class(self.spec)


def check_announcing_imports_no_torch(case: Announced) -> None:
    """The plugin's module and its options are read on every start, for whatever run: they must be light."""
    module = (case.spec.config or "").partition(":")[0]
    program = (
        "import sys; from framework.plugins import registry; registry()\n"
        f"if {module!r}: __import__({module!r})\n"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{case.name}: another process cannot announce it: {_last_line(ran.stderr)}"
    assert ran.stdout.splitlines()[-1:] == ["False"], (
        f"{case.name}: announcing it, or its options, imports torch. Import that where the component is"
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def check_yaml_file_selects_it(case: Announced) -> None:
    """`KIND=NAME` on the command line composes, and what comes out names the component."""
    try:
        config = compose([case.word])
    except ConfigError as error:
        raise AssertionError(f"{case.name}: {case.word} does not compose: {error}") from error
    if case.spec.kind == "stage":
        assert case.spec.name in [stage.name for stage in config.sampler.stages], (
            f"{case.name}: {case.word} composes, and no stage of the pipeline has that name"
        )
    else:
        chosen = getattr(config, case.prefix).name
        assert chosen == case.spec.name, f"{case.name}: {case.word} composes to {case.prefix}={chosen}"


def check_unknown_option_is_refused(case: Announced) -> None:
    """Nothing is accepted and ignored."""
    _assert_refused(case, NO_SUCH_OPTION, "1")


def check_option_of_a_wrong_type_is_refused(case: Announced) -> None:
    """Each number and each switch, by the name of its key."""
    typed = list(_typed(case.options_class()))
    if not typed:
        raise Skipped("the component has no option that is a number or a switch")
    for option in typed:
        _assert_refused(case, option, WRONG)


def _typed(cls: Any) -> Iterator[str]:
    if is_dataclass(cls):
        hints = get_type_hints(cls)
        for field in fields(cls):
            if hints[field.name] in (int, float, bool):
                yield field.name


def _assert_refused(case: Announced, option: str, value: str) -> None:
    chosen = case.word
    word = f"{case.prefix}.{option}={value}"
    try:
        compose([chosen, word])
    except ConfigError as error:
        assert option in str(error), f"{case.name}: {word} is refused without naming {option}: {error}"
        return
    raise AssertionError(f"{case.name}: {word} is accepted")


COMPONENT_CHECKS = (
    check_announcing_imports_no_torch,
    check_yaml_file_selects_it,
    check_unknown_option_is_refused,
    check_option_of_a_wrong_type_is_refused,
)
