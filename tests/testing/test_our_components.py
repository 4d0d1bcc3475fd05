"""Every component of ours passes what `python -m framework check` runs for it."""

import pytest

from framework.discovery import OURS
from framework.plugins import registry
from framework.testing.checking import run_check
from framework.testing.kits import KITS, suite_of

PLUGINS = registry()
SPECS = [spec for kind in KITS for spec in PLUGINS.specs(kind) if spec.dist == OURS]
FIRST = {spec.kind: spec for spec in reversed(SPECS)}


def params():
    """One a kind by default: the suites themselves run in the tests of each kind."""
    for spec in SPECS:
        marks = () if FIRST[spec.kind] is spec else pytest.mark.full
        yield pytest.param(spec, id=f"{spec.kind}/{spec.name}", marks=marks)


@pytest.mark.parametrize("spec", list(params()))
def test_it_passes_its_suite(spec):
    reason = PLUGINS.usable(spec.kind, spec.name)
    if reason is not None:
        pytest.skip(f"cannot be used here: {reason}")
    outcomes = [run_check(check, case) for check, case in suite_of(PLUGINS, spec.kind, spec.name).checks]
    assert [one for one in outcomes if one.result == "failed"] == []


def test_every_kind_with_a_suite_says_so_on_the_page():
    from pathlib import Path

    page = (Path(__file__).resolve().parents[2] / "docs" / "checking.md").read_text(encoding="utf-8")
    assert [kind for kind in KITS if f"| `{kind}` |" not in page] == []
