"""Runs of the command line: one module each, with `run(config, args)`. Only the command line calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunArgs:
    """What the command line alone says: texts, byte for byte, and the options of the chosen run.

    prompt, system  the text itself; `@file` has been read by now
    target          what a run such as `check` is about
    """

    prompt: str | None = None
    system: str | None = None
    prompts_file: str | None = None
    output: str | None = None
    target: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
