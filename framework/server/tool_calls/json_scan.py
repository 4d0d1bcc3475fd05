"""One JSON value read a character at a time: where it is nested, where it ends, and which character breaks it.

Makes no values; `call_reader` follows a call's arguments with it. Strings may hold control characters, which models
write and JSON forbids: `in_string` says where they have to be escaped.
"""

from __future__ import annotations

import re

_SPACE = " \t\r\n"
_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_CLOSES = {"}": "{", "]": "["}


class JsonScan:
    """depth: containers that are open. in_string: whether the character taken last stands inside of a string."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._take = self._value
        self._literal = ""
        self._hex_left = 0
        self._is_key = False
        self.in_string = False
        self.is_done = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def take(self, c: str) -> bool:
        """Goes on by one character; False when it cannot stand here. Nothing may be taken after that, or the end."""
        return self._take(c)

    def _value(self, c: str) -> bool:
        if c in _SPACE:
            return True
        if c == '"':
            return self._begin_string(is_key=False)
        if c in "{[":
            self._open.append(c)
            self._take = self._first_key if c == "{" else self._first_item
            return True
        self._literal, self._take = c, self._in_literal
        return c in "-0123456789tfn"

    def _first_item(self, c: str) -> bool:
        return self._close(c) if c == "]" else self._value(c)

    def _first_key(self, c: str) -> bool:
        return self._close(c) if c == "}" else self._key(c)

    def _key(self, c: str) -> bool:
        return c in _SPACE or (c == '"' and self._begin_string(is_key=True))

    def _colon(self, c: str) -> bool:
        if c == ":":
            self._take = self._value
        return c in _SPACE or c == ":"

    def _after(self, c: str) -> bool:
        if c == ",":
            self._take = self._key if self._open[-1] == "{" else self._value
            return True
        return c in _SPACE or self._close(c)

    def _close(self, c: str) -> bool:
        if _CLOSES.get(c) != self._open[-1]:
            return False
        self._open.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.is_done = not self._open
        self._take = self._after

    # ------------------------------------------------------------------------------------------------ strings, numbers

    def _begin_string(self, is_key: bool) -> bool:
        self._is_key, self._take = is_key, self._string
        return True

    def _string(self, c: str) -> bool:
        self.in_string = c != '"'
        if c == "\\":
            self._take = self._escape
        elif c == '"' and self._is_key:
            self._take = self._colon
        elif c == '"':
            self._end_value()
        return True

    def _escape(self, c: str) -> bool:
        self._take, self._hex_left = (self._hex, 4) if c == "u" else (self._string, 0)
        return c in '"\\/bfnrtu'

    def _hex(self, c: str) -> bool:
        self._hex_left -= 1
        if not self._hex_left:
            self._take = self._string
        return c in "0123456789abcdefABCDEF"

    def _in_literal(self, c: str) -> bool:
        """A number, true, false or null: the character behind it is the first that is none of its own."""
        if c not in _SPACE and c not in ",]}":
            self._literal += c
            return True
        if not _LITERAL.fullmatch(self._literal):
            return False
        self._end_value()
        return self._after(c)
