"""Options of the runs, `run.KEY` on the command line, a dataclass each. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from framework.errors import ConfigError


@dataclass(frozen=True)
class ChatOptions:
    """template: what the chat template reads beside the messages, such as run.template.enable_thinking=false."""

    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExplainOptions:
    """json: one JSON object instead of tables. build: make the engine too, for what only then is known."""

    json: bool = False
    build: bool = False


@dataclass(frozen=True)
class BenchOptions:
    """json: one JSON object instead of tables. warmup, rounds: untimed and timed passes. plot: an SVG file."""

    json: bool = False
    warmup: int = 1
    rounds: int = 3
    plot: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("rounds", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"run.{name}={value} is too small. Use {least} or more")
        if self.plot is not None and not self.plot.endswith(".svg"):
            raise ConfigError(f"run.plot={self.plot}: plots are SVG. Name a file that ends in .svg")
