"""One call in JSON, read a character at a time: `{"name": ..., "arguments": {...}}`, or the arguments alone.

Knows nothing of what stands around a call; called by `json_calls`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from framework.server.tool_calls.json_scan import JsonScan

NAME = r"[\w.:/-]+"
_NAME = re.compile(NAME)
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{')


class CallReader:
    """A call that is being read. `take` gives what goes out of its arguments.

    name       None until the call is known to be one
    held       what was read before that
    is_whole   its text has ended
    is_broken  the last character cannot stand there and is not part of `held`; or, with is_whole, it is no call

    Arguments come as they are read when the name stands before them, and at the end otherwise.
    """

    def __init__(self, name: str | None = None, *, needs_arguments: bool = False) -> None:
        self.name = name
        self.held = ""
        self.is_whole = self.is_broken = False
        self.is_in_arguments = name is not None
        self._scan = JsonScan()
        self._base = 1 if name is None else 0  # containers around the arguments
        self._needs_arguments = needs_arguments

    def take(self, c: str) -> str:
        if not self._scan.take(c):
            self.is_broken = True
            return ""
        self.is_whole = self._scan.is_done
        if self.is_in_arguments:
            self.is_in_arguments = self._scan.depth > self._base
            return c if c >= " " or not self._scan.in_string else json.dumps(c)[1:-1]
        return self._outside(c) if self.name is None else ""

    def _outside(self, c: str) -> str:
        """Of the object itself, whose arguments have not begun."""
        self.held += c
        if c == "{" and self._scan.depth == 2 and (head := _HEAD.fullmatch(self.held)):
            self.name, self.is_in_arguments = head[1], True
            return c
        return self._at_the_end() if self.is_whole else ""

    def _at_the_end(self) -> str:
        call = _call_of(self.held, self._needs_arguments)
        if call is None:
            self.is_broken = True
            return ""
        self.name, arguments = call
        return arguments


def _call_of(text: str, needs_arguments: bool) -> tuple[str, str] | None:
    """(name, arguments as JSON) of an object with any members beside these, None when it is no call."""
    found = _loaded(text)
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not _NAME.fullmatch(found["name"]):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if arguments is None and not needs_arguments:
        arguments = {}
    if isinstance(arguments, str):  # JSON in a string of JSON
        arguments = _loaded(arguments)
    written = _written(arguments)
    return None if written is None else (found["name"], written)


def _written(arguments: Any) -> str | None:
    """JSON of an object, None for anything else."""
    try:
        return json.dumps(arguments, allow_nan=False) if isinstance(arguments, dict) else None
    except ValueError:  # a number too large for a float
        return None


def _loaded(text: str) -> Any:
    """The value, None for what cannot be read."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):  # too long a number is a ValueError too
        return None
