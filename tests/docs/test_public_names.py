"""The page of public names says what plugins may import, and each name that the reference lists is there."""

import importlib
import re
import runpy

import pytest

import framework

from .pages import ROOT

PAGE = (ROOT / "docs" / "public-names.md").read_text(encoding="utf-8")
NAMES = (ROOT / "docs" / "api" / "names.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", NAMES, re.MULTILINE))
IMPORTS = runpy.run_path(str(ROOT / "tests" / "test_imports.py"))


def names_of(row):
    return re.findall(r"`(\w+)`", row)


@pytest.mark.parametrize("module", ROWS)
def test_every_listed_name_exists(module):
    found = importlib.import_module(module)
    assert [name for name in names_of(ROWS[module]) if not hasattr(found, name)] == []


def test_exports_of_the_package_are_listed():
    assert sorted(names_of(ROWS["framework"])) == sorted(framework.__all__)


def test_page_opens_what_plugins_may_import_and_no_more():
    opened = set(re.findall(r"`framework\.([\w.]+)`", PAGE.split("## Versions")[0]))
    closed = {"plugins.conf", "conf", "engine", "worker"}  # a group, and what the page warns of
    assert opened - closed == IMPORTS["OPEN_TO_PLUGINS"] | IMPORTS["ARRAY_FUNCTIONS_OF_STAGES"]


def test_page_states_the_version_of_the_contracts():
    assert str(framework.API_VERSION) in PAGE
