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
