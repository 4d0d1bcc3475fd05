"""Expressions that xgrammar reads otherwise than they are written: refused here, as parts of schemas are.

The library ignores what stands in a place that it does not expect, and writes letters that JSON spells with a
backslash as they are. Each rule below is held against the library by a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PART = re.compile(
    r"""
    (?P<escape>\\(?:c[A-Za-z]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|.))
    |(?P<set>\[\^?(?:\\.|[^\]\\])*\])
    |(?P<look>\(\?<?[=!])
    |(?P<letter>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_KNOWN = frozenset("dDwWsSnrtfv0cxubBpPk")
"""Letters that mean something behind a backslash, or that the library refuses by itself."""
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def objections(pattern: str, *, in_json: bool) -> Iterator[str]:
    """What xgrammar reads wrongly in an expression. in_json: what matches it is spelled in a JSON string."""
    for part in _PART.finditer(pattern):
        text, kind = part.group(), part.lastgroup
        if kind == "look":
            yield f"'{text}' (looking around) is not read by xgrammar"
        if kind == "letter" and text in "^$" and not _is_at_border(pattern, part.start(), text):
            yield f"'{text}' in the middle of an expression is not read by xgrammar"
        if kind == "escape" and text[1].isalpha() and text[1] not in _KNOWN:
            yield f"'{text}' is read as the letter '{text[1]}' by xgrammar"
        if in_json and kind in ("letter", "escape") and _needs_escape(text):
            yield f"'{text}' stands for a character that JSON spells with a backslash, which xgrammar does not"


def _is_at_border(pattern: str, at: int, anchor: str) -> bool:
    """Whether nothing can stand before a `^`, or behind a `$`, within its branch."""
    if anchor == "^":
        return re.search(r"(^|[(|^]|\(\?:|\(\?<\w+>)$", pattern[:at]) is not None
    return pattern[at + 1 : at + 2] in ("", ")", "|", "$")


def _needs_escape(text: str) -> bool:
    character = _character(text)
    return character is not None and (character in '"\\' or character < " ")


def _character(text: str) -> str | None:
    """The one character that a part outside of sets matches; None when there are several."""
    if text[0] != "\\":
        return text
    name, digits = text[1], text[2:].strip("{}")
    if name in _CONTROLS:
        return _CONTROLS[name]
    if name == "c":
        return chr(ord(digits.upper()) % 32) if digits else None
    if name in "xu" and digits:
        code = int(digits, 16)
        return chr(code) if code < 0x110000 else None
    return None if name.isalnum() else name
