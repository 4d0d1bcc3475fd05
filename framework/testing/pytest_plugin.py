"""Contract suites as pytest tests: `pytest_plugins = ["framework.testing.pytest_plugin"]` in the uppermost conftest.

    @pytest.mark.contract("stage/acme_bias")
    def test_it_keeps_its_contract(contract_check):
        contract_check()

gives a test for each check of an installed component. A case object in the place of the name checks what is not
installed, or what an installed one is to be checked with.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from framework.errors import ConfigError
from framework.plugins import KINDS, registry
from framework.testing.checking import Check, name_of
from framework.testing.kits import KITS, suite_of

FIXTURE = "contract_check"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contract(what): KIND/NAME of an installed component, or a case of a suite")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a check, where the test asks for `contract_check`."""
    if FIXTURE not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("contract")
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError(f'{metafunc.function.__name__} needs @pytest.mark.contract("KIND/NAME"), or a case')
    checks = _checks(marker.args[0])
    metafunc.parametrize(FIXTURE, [partial(check, case) for check, case in checks], ids=_ids(checks))


def _checks(what: Any) -> list[tuple[Check, Any]]:
    if not isinstance(what, str):
        suites = [kit.checks for kit in KITS.values() if isinstance(what, kit.case)]
        if not suites:
            raise pytest.UsageError(f"contract({what!r}): neither KIND/NAME nor a case of a suite")
        return [(check, what) for check in suites[0]]
    kind, _, name = what.partition("/")
    if kind not in KINDS or kind not in KITS or not name:
        raise pytest.UsageError(f"contract({what!r}): write KIND/NAME. Kinds with a suite: {', '.join(KITS)}")
    try:
        return list(suite_of(registry(), kind, name).checks)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


def _ids(checks: list[tuple[Check, Any]]) -> list[str]:
    """Names of the checks; those of a second case are numbered."""
    seen: dict[str, int] = {}
    ids = []
    for check, _ in checks:
        name = name_of(check).replace(" ", "_")
        seen[name] = seen.get(name, 0) + 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids
