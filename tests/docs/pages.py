"""Reads a page of documentation as a program: its blocks are run in order, and what they print is compared.

A ```python block runs in the page's one namespace, a ```sh block line by line in the page's folder, and a ```text block
right after either is what it must have printed (after ```sh, three dots stand for anything and spaces may differ).
A line of ```sh may end in `< FILE`.
A block under a caption such as `name.py`: is written to that file; blocks in other languages are for the eye.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CAPTION = re.compile(r"`([\w./-]+)`:")
COMMAND_SECONDS = 120


@dataclass(frozen=True)
class Block:
    """A fenced block. path: the file it is written to, None without a caption; line: of its first line of content."""

    language: str
    text: str
    path: str | None
    line: int


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.splitlines()
    at, caption = 0, None
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = lines.index("```", at + 1)
            text = "".join(f"{inner}\n" for inner in lines[at + 1 : end])
            found.append(Block(line[3:], text, caption, at + 2))
            at, caption = end, None
        elif line.strip():
            match = CAPTION.fullmatch(line.strip())
            caption = match[1] if match else None
        at += 1
    return found


class PageRun:
    """One page's namespace and folder. `site` is where its `pip install` puts the package that it builds."""

    def __init__(self, name: str, folder: Path, site: Path):
        self.name, self.folder, self.site = name, folder, site
        self.namespace: dict[str, object] = {"__name__": "__page__"}

    def run(self, blocks: list[Block]) -> int:
        """Runs every block; the number of outputs that were compared. AssertionError names the line of the page."""
        compared = 0
        printed: str | None = None
        agree = equal
        for block in blocks:
            where = f"{self.name}:{block.line}"
            if block.path is not None:
                self._write(block.path, block.text)
                printed = None
            elif block.language == "python":
                printed, agree = self._python(block), equal
            elif block.language == "sh":
                printed, agree = self._commands(block.text, where), matches
            elif block.language == "text" and printed is not None:
                assert agree(block.text, printed), f"{where} does not say what was printed:\n{printed}"
                compared, printed = compared + 1, None
            else:
                printed = None
        return compared

    def _write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _python(self, block: Block) -> str:
        out = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, self.name, "exec")  # a trace names the page's line
        with contextlib.redirect_stdout(out):
            exec(code, self.namespace)
        return out.getvalue()

    def _commands(self, text: str, where: str) -> str:
        return "".join(self._command(line, where) for line in text.splitlines() if line and not line.startswith("#"))

    def _command(self, line: str, where: str) -> str:
        words = shlex.split(line)
        if words[:2] == ["pip", "install"]:
            # From the page's folder, into one that later commands see, and without a network.
            offline = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(self.site)]
            words = ["python", "-m", "pip", "install", *offline, *(w for w in words[2:] if w != "-e")]
        assert words[0] == "python", f"{where}: only python and pip install are run, not {words[0]}"
        typed = ""  # what stands on stdin
        if words[-2:-1] == ["<"]:
            typed = (self.folder / words[-1]).read_text(encoding="utf-8")
            words = words[:-2]
        result = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"},
            input=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        refused = result.stdout.splitlines()[-1:] and result.stdout.splitlines()[-1].startswith("error: ")
        has_failed_jobs = re.search(r"^\d+ jobs, [1-9]\d* failed: .*\n\Z", result.stdout, re.MULTILINE)  # of a sweep
        expected = 2 if refused else 1 if has_failed_jobs else 0
        assert result.returncode == expected, f"{where}: {line} ended with {result.stdout}"
        return result.stdout


def equal(expected: str, printed: str) -> bool:
    return expected.strip() == printed.strip()


def matches(expected: str, printed: str) -> bool:
    """Whether a command printed the text: three dots stand for anything, and columns may be wider or narrower."""
    expected, printed = (re.sub(" +", " ", text.strip()) for text in (expected, printed))
    pattern = ".*?".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None
