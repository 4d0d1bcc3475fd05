"""Every page of the documentation, and the README, does what it says."""

import re

import pytest

from .pages import ROOT, Block, PageRun, blocks_of, matches

INDEX = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if page != INDEX and page.parent.name != "api"]
LINK = re.compile(r"\]\(([^)#\s]+)")


def title(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", RUN, ids=title)
def test_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    run = PageRun(page.name, folder, tmp_path / "site")
    compared = run.run(blocks)
    assert any(block.language == "python" for block in blocks), f"{page.name} has nothing to run"
    assert compared == sum(block.language == "text" for block in blocks), "a text block stands after nothing that runs"


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_index_leads_to_every_page():
    linked = {(INDEX.parent / target).resolve() for target in LINK.findall(INDEX.read_text(encoding="utf-8"))}
    assert [title(page) for page in PAGES[1:] if page != INDEX and page not in linked] == []


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    own = {block.path for block in blocks_of(text)}
    for named in set(re.findall(r"`((?:framework|conf|plugins|tests|benchmarks)/[\w./-]+)`", text)) - own:
        assert (ROOT / named).exists(), f"{page.name} names {named}, which is not there"


def test_a_page_that_says_something_else_fails(tmp_path):
    blocks = [Block("python", "print(1 + 1)\n", None, 3), Block("text", "3\n", None, 7)]
    with pytest.raises(AssertionError, match="made-up:7 does not say what was printed"):
        PageRun("made-up", tmp_path, tmp_path).run(blocks)


def test_captions_name_files_and_only_right_before_a_block():
    page = "`a/b.yaml`:\n\n```yaml\nx: 1\n```\n`c.py`:\nSome text.\n```python\npass\n```\n"
    assert [(b.language, b.path, b.text) for b in blocks_of(page)] == [
        ("yaml", "a/b.yaml", "x: 1\n"),
        ("python", None, "pass\n"),
    ]


def test_dots_stand_for_anything_and_other_text_for_itself():
    assert matches("one\n...\nfour (4)", "one\ntwo\nthree\nfour (4)\n")
    assert not matches("one\n...\nfour", "one\ntwo\nfive\n")
