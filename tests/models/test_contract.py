"""Every family of ours passes the contract suite of models. Those checks that take longest run for a few of them by
default, and how components are announced is checked for all kinds elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from framework.discovery import OURS
from framework.plugins import registry
from framework.testing.checking import Check, Skipped, name_of
from framework.testing.kits import suite_of
from framework.testing.model_bench import ModelCase
from framework.testing.model_engine import ENGINE_CHECKS
from framework.testing.models import check_a_step_can_be_exported

PLUGINS = registry()
FAMILIES = [spec.name for spec in PLUGINS.specs("model") if spec.dist == OURS and spec.cases is not None]
WHOLE = {"llama", "gemma2", "qwen3_moe", "deepseek_v2"}
"""One of each kind of attention and of feed-forward block."""
LONG = (*ENGINE_CHECKS, check_a_step_can_be_exported)


def checks() -> list[Any]:
    found = []
    for family in FAMILIES:
        own = [pair for pair in suite_of(PLUGINS, "model", family).checks if isinstance(pair[1], ModelCase)]
        for number, (check, case) in enumerate(own):
            marks = pytest.mark.full if check in LONG and family not in WHOLE else ()
            found.append(pytest.param(check, case, id=f"{family}-{number}-{name_of(check)}", marks=marks))
    return found


def test_every_family_of_ours_has_a_case() -> None:
    assert [spec.name for spec in PLUGINS.specs("model") if spec.dist == OURS and spec.cases is None] == []


@pytest.mark.parametrize(("check", "case"), checks())
def test_it_keeps_its_contract(check: Check, case: Any) -> None:
    """Engines can be built of all of them wherever these tests run."""
    try:
        check(case)
    except Skipped as why:
        assert check not in ENGINE_CHECKS, why
        raise
