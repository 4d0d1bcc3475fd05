"""The page: one document that needs nothing from elsewhere, and whose policy lets its own parts run and no others."""

import base64
import hashlib
import re

import pytest

pytest.importorskip("fastapi")

from framework.server.page import PARTS, SCRIPTS, document


def test_policy_names_the_parts_of_the_document_by_their_hashes():
    page, policy = document()
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_policy_lets_nothing_else_in():
    rules = dict(rule.split(" ", 1) for rule in document()[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in document()[1]


def test_document_names_no_address_but_that_of_svg():
    assert set(re.findall(r"https?://[^\s'\"`]+", document()[0])) == {"http://www.w3.org/2000/svg"}


def test_document_has_no_style_and_no_script_in_attributes():
    body = document()[0].partition("<body>")[2]
    assert not re.search(r"\s(style|on\w+)=", body)


def test_every_part_of_the_script_is_read():
    assert {path.stem for path in PARTS.glob("*.js")} == set(SCRIPTS)


def test_labels_point_at_elements_that_are_there_and_ids_are_named_once():
    page = document()[0].partition("<body>")[2]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:for|aria-controls|aria-labelledby)="([^"]+)"', page)) <= set(ids)


def colours(theme):
    """{name: rgb, 0 to 1} of the variables of a theme."""
    style = (PARTS / "style.css").read_text(encoding="utf-8")
    block = re.search(rf"^{re.escape(theme)} {{(.*?)^}}", style, re.DOTALL | re.MULTILINE)[1]
    found = re.findall(r"--([\w-]+): #(\w{6});", block)
    return {name: [int(code[at : at + 2], 16) / 255 for at in (0, 2, 4)] for name, code in found}


def luminance(rgb):
    """Relative luminance by WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [":root", ':root[data-theme="dark"]'])
def test_text_and_controls_stand_out_from_what_is_behind_them(theme):
    """WCAG 2 AA: 4.5 for text, 3 for borders of controls and lines of charts."""
    found = colours(theme)
    for behind in ("ground", "surface"):
        for name in ("text", "muted", "accent", "error", "decode", "prefill"):
            assert contrast(found[name], found[behind]) >= 4.5, (name, behind)
        assert contrast(found["strong-line"], found[behind]) >= 3, behind
    assert contrast(found["on-accent"], found["accent"]) >= 4.5
    assert contrast(found["text"], found["tint"]) >= 4.5
    assert contrast(found["error"], found["error-tint"]) >= 4.5


def test_dark_theme_is_the_same_whether_the_system_or_the_reader_chose_it():
    style = (PARTS / "style.css").read_text(encoding="utf-8")
    by_system = re.search(r":root:not\(\[data-theme=\"light\"\]\) {(.*?)}", style, re.DOTALL)[1]
    by_reader = re.search(r":root\[data-theme=\"dark\"\] {(.*?)}", style, re.DOTALL)[1]
    assert by_system.split() == by_reader.split()
