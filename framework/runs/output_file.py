"""The file of `output=`: what it held stays until the run can begin, and every line is in it before the next is made.

A file that cannot be opened or written is a ConfigError that names the key. `run=generate` makes the lines.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from framework.errors import ConfigError


class OutputFile:
    """A context that writes JSON lines. Raises ConfigError when `path` cannot be opened or written."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "w", encoding="utf-8", opener=_open_as_it_is)  # noqa: SIM115  closed by __exit__
        except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
            reason = getattr(e, "strerror", None) or e
            raise ConfigError(f"output={path}: {reason}; name a file in a folder that can be written") from None

    def begin(self) -> None:
        """Drops what the file held."""
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # pipes and devices hold nothing
            self._file.truncate(0)

    def write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as e:
            raise self._refusal(e) from None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._file.close()
        except OSError as e:
            if kind is None:  # else it is the cause once more: the line that could not be written is still buffered
                raise self._refusal(e) from None

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"output={self._path}: {error.strerror}. The lines before are in it; make room, or name another file"
        )


def refuse_same_file(files: Mapping[str, str | None]) -> None:
    """ConfigError when two keys name one file, by whatever names: one would overwrite the other. Devices are shared."""
    named: dict[str, str] = {}
    for key, path in files.items():
        if not path or (Path(path).exists() and not Path(path).is_file()):
            continue
        where = os.path.realpath(path)
        if where in named:
            raise ConfigError(f"{key}={path} is the file of {named[where]}; name another file")
        named[where] = f"{key}={path}"


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)
