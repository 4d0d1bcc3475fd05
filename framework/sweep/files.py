"""JSON files of a sweep, written whole or not at all. The job, the lock and the results use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.errors import ConfigError


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces the file in one move: a reader, and a process that is killed, leave the old one or the new one."""
    write_text(path, _dumped(value) + "\n")


def as_json(value: Mapping[str, Any]) -> Any:
    """What `read_json` gives back of it: JSON has texts for keys, and lists alone."""
    return json.loads(_dumped(value))


def write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds. ConfigError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}. Remove it, and resume the sweep") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object. Remove it, and resume the sweep")
    return value


def _dumped(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, default=str)
