"""Tables and titles for people who read a terminal: columns by what a character is wide, long cells wrapped.

Makes lines and prints nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence

GAP = "  "
LEAST = 24
"""Columns that are left to the last cell of a line, however narrow the terminal is."""


def table(rows: Sequence[Sequence[str]], width: int | None = None, indent: str = "") -> list[str]:
    """Lines of the rows, columns aligned; the last column goes on in lines of its own beyond `width` columns."""
    if not rows:
        return []
    widths = [max(map(columns_of, column)) for column in zip(*rows, strict=True)]
    left = columns_of(indent) + sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    room = None if width is None else max(LEAST, width - left)
    lines = []
    for row in rows:
        first, *more = wrapped(row[-1], room)
        cells = [cell + " " * (size - columns_of(cell)) for cell, size in zip(row[:-1], widths[:-1], strict=True)]
        lines.append((indent + GAP.join([*cells, first])).rstrip())
        lines += [" " * left + piece for piece in more]
    return lines


def wrapped(text: str, width: int | None) -> list[str]:
    """Pieces of at most `width` columns, broken at spaces; a longer word stands alone. One piece for no width."""
    if width is None or columns_of(text) <= width:
        return [text]
    pieces = [""]
    for word in text.split(" "):
        longer = f"{pieces[-1]} {word}" if pieces[-1] else word
        if pieces[-1] and columns_of(longer) > width:
            pieces.append(word)
        else:
            pieces[-1] = longer
    return pieces


def columns_of(text: str) -> int:
    """Columns that a terminal gives to `text`: two for wide characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, None when it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def title(text: str) -> str:
    """A heading: bold where stdout is a terminal that can show it and NO_COLOR is not set."""
    plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
    return text if plain else f"\x1b[1m{text}\x1b[0m"


def paragraph(text: str, width: int | None, indent: str = "") -> list[str]:
    """Lines of a text, indented."""
    return [indent + piece for piece in wrapped(text, None if width is None else width - columns_of(indent))]
