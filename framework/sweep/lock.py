"""`sweep.lock.json`: what a sweep is and where it ran, so that it can be understood, done again, and resumed.

Written in the parent process before the first job of every start. Resuming asks it whether the folder holds the same
sweep; what of the surroundings has changed by then is said and noted, and does not stop it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import framework
from framework.errors import ConfigError
from framework.plugins import registry
from framework.sweep.files import as_json, read_json, write_json

LOCK = "sweep.lock.json"
FORMAT = 1
PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "tokenizers")


@dataclass(frozen=True)
class Size:
    """varied: keys that have several values, in the order of the words. num_jobs: None where the sweeper decides it."""

    varied: Sequence[str]
    num_jobs: int | None


def write_lock(
    folder: Path, argv: Sequence[str], words: Sequence[str], config: Mapping[str, Any], size: Size
) -> dict[str, Any]:
    """Begins the sweep in `folder`, or notes that it is resumed; the lock as it is now.

    argv    the typed command line, which resuming runs again
    words   as Hydra has them, those of `hydra.*` left out
    config  the resolved configuration, before the words that vary are applied
    ConfigError when the folder holds another sweep.
    """
    path = folder / LOCK
    lock: dict[str, Any] = {
        "format": FORMAT,
        "words": list(words),
        "varied": list(size.varied),
        "num_jobs": size.num_jobs,
        "config": as_json(config),
        "argv": list(argv),
        "folder": os.getcwd(),
        "starts": [],
    }
    if path.exists():
        lock = _of_the_same(folder, read_json(path), lock)
    now = surroundings()
    if lock["starts"] and (changed := differences(lock["starts"][0]["surroundings"], now)):
        print(f"{folder}: resumed with another {', '.join(changed)} than it began with", file=sys.stderr)
    lock["starts"].append({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "surroundings": now})
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, lock)
    return lock


def _of_the_same(folder: Path, before: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The lock that is there. ConfigError when the sweep that begins now is not the one it describes."""
    if before.get("format") != FORMAT:
        raise ConfigError(f"{folder / LOCK}: format {before.get('format')} is not known here. Use another folder")
    if before["words"] != now["words"]:
        raise ConfigError(
            f"hydra.sweep.dir={folder} holds the sweep of {' '.join(before['words'])}. Name another folder, or resume "
            f"that one: python -m framework.sweep --resume {folder}"
        )
    changed = differences(before["config"], now["config"])
    if changed:
        raise ConfigError(
            f"hydra.sweep.dir={folder}: {', '.join(changed)} had another value when this sweep began. Name another "
            "folder, or set it back"
        )
    return before


def surroundings() -> dict[str, Any]:
    """Versions of what runs, the commits it was taken from, and the machine."""
    from framework.runs.bench.report import machine

    plugins = registry()
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "plugins": dict(plugins.versions),
        "commit": {"framework": _commit_of_the_package(), "folder": _commit(Path.cwd())},
        "machine": machine(),
        "backends": {spec.name: plugins.usable("backend", spec.name) or "usable" for spec in plugins.specs("backend")},
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys under which two trees differ."""
    found = []
    for key in dict.fromkeys([*one, *other]):
        left, right = one.get(key), other.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{prefix}{key}")
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit_of_the_package() -> dict[str, Any] | None:
    """None where this package is not part of a working tree, though a folder above it may be one."""
    folder = Path(framework.__file__).parent
    return _commit(folder) if _git(folder, "ls-files", "--error-unmatch", "__init__.py") else None


def _commit(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and whether tracked files differ from it; None outside of a working tree."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"id": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *words: str) -> str:
    """What git says, empty where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
