"""The reference in docs/api is what the sources say, and all of it."""

import runpy

import pytest

import framework
from framework.config import compose
from framework.discovery import conf_roots
from framework.words import Vocabulary

from .pages import ROOT

BUILD = runpy.run_path(str(ROOT / "docs" / "build_api.py"))
PAGES = {path.name: text for path, text in BUILD["pages"]().items()}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_sources_say(name):
    committed = (ROOT / "docs" / "api" / name).read_text(encoding="utf-8")
    assert committed == PAGES[name], "run: python docs/build_api.py"


def test_every_public_name_has_its_place():
    absent = [name for name in framework.__all__ if f"### {name}\n" not in PAGES["python.md"]]
    assert absent == ["__version__"]


def test_every_key_and_choice_has_its_row():
    page, vocabulary = PAGES["configuration.md"], Vocabulary.read(conf_roots())
    keys = [f"{group}.{name}" for group, node in vars(compose([])).items() for name in getattr(node, "__dict__", ())]
    ours = [key for key in keys if key.partition(".")[2] not in ("name", "options", "stages", "params")]
    choices = [f"{group}={option}" for group, options in vocabulary.options.items() for option in options]
    assert [word for word in (*ours, *choices) if f"| `{word}` |" not in page] == []


def test_every_key_says_what_it_means():
    rows = [line.split(" | ") for line in PAGES["configuration.md"].splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if not row[-1].strip(" |") or (len(row) > 2 and not row[2].strip(" |"))] == []


def test_columns_become_a_list_and_signs_stay_as_they_are():
    doc = "First line, a * b.\n\nname, other   [T] int32,\n              more of it\nLast `x[0]`."
    assert BUILD["markdown"](doc) == (
        "First line, a \\* b.\n\n- `name, other`: \\[T\\] int32, more of it\n\nLast `x[0]`."
    )
