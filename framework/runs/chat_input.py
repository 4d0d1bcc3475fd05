"""What a user types into `run=chat`: lines with history and editing at a terminal, plain lines from a pipe or a file.

Gives whole messages; a backslash at the end of a line and triple quotes make one of several lines. Knows no engine.
"""

from __future__ import annotations

import io
import sys
from typing import TextIO

FIRST, MORE = "> ", ". "
QUOTES = '"""'


class ChatInput:
    """Messages of stdin, one a call of `read`.

    At a terminal a prompt is shown: by readline where stdout is one as well, else on stderr.
    """

    def __init__(self, stdin: TextIO | None = None) -> None:
        self._stdin = sys.stdin if stdin is None else stdin
        self.is_terminal = self._stdin.isatty()
        self._edits = self.is_terminal and self._stdin is sys.stdin and sys.stdout.isatty()
        if isinstance(self._stdin, io.TextIOWrapper):
            # Bytes that are no UTF-8 make a message that is refused, and not an end of the program.
            self._stdin.reconfigure(errors="surrogateescape")
        if self._edits:
            _set_up_readline()

    def read(self) -> str | None:
        """The next message without its last line break, None at the end. KeyboardInterrupt for Ctrl-C at a terminal."""
        line = self._line(FIRST)
        if line is None:
            return None
        if line.lstrip().startswith(QUOTES):
            return self._quoted(line.lstrip()[len(QUOTES) :])
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._line(MORE)
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines)

    def _quoted(self, line: str) -> str:
        lines = []
        while QUOTES not in line:
            lines.append(line)
            more = self._line(MORE)
            if more is None:  # the end of the input closes the quotes
                return "\n".join(lines).removeprefix("\n")
            line = more
        lines.append(line.partition(QUOTES)[0])
        return "\n".join(lines).removeprefix("\n").removesuffix("\n")

    def _line(self, prompt: str) -> str | None:
        if self._edits:
            try:
                line = input(prompt)
            except EOFError:
                print()
                return None
            _remember(line)
            return line
        if self.is_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = self._stdin.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None


def _set_up_readline() -> None:
    """History and editing of lines; a pasted text of several lines arrives as one message."""
    try:
        import readline
    except ImportError:  # a Python without it: the terminal's own editing is left
        return
    readline.set_auto_history(False)
    readline.parse_and_bind("set enable-bracketed-paste on")


def _remember(line: str) -> None:
    """Puts a line into the history, blank ones left out."""
    readline = sys.modules.get("readline")
    if readline is not None and line.strip():
        readline.add_history(line)
