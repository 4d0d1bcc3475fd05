"""Server-sent events out of bytes that come in any pieces. Knows neither HTTP nor what the events mean.

Only `data` is kept: the fields `event`, `id` and `retry` and the comments that keep a connection alive are passed over.
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventParser:
    """`feed(bytes)` returns the data of the events that are whole by then (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._is_first = True

    def feed(self, piece: bytes) -> list[str]:
        """Data of each finished event; several `data` lines of one are joined by line breaks."""
        *lines, self._rest = self._split(self._rest + piece)
        return [event for line in lines for event in self._take(line)]

    @property
    def is_open(self) -> bool:
        """Whether an event has begun and has not ended."""
        return bool(self._lines or self._rest)

    def _split(self, text: bytes) -> list[bytes]:
        # A carriage return at the end may be half of a line's end: it stays until the next byte is there.
        whole, held = (text[:-1], b"\r") if text.endswith(b"\r") else (text, b"")
        lines = _LINE_END.split(whole)
        lines[-1] += held
        return lines

    def _take(self, line: bytes) -> list[str]:
        if self._is_first:
            line, self._is_first = line.removeprefix(b"\xef\xbb\xbf"), False
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._lines.append(value.removeprefix(b" "))
            return []
        event, self._lines = self._lines, []
        return [b"\n".join(event).decode("utf-8", "replace")] if event else []
