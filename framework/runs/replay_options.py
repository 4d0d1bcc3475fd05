"""Options of `run=replay`, `run.KEY` on the command line. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from framework.errors import no_such_choice


@dataclass(frozen=True)
class ReplayOptions:
    """json: one JSON object instead of a report. compare: tokens, or stages as well; None: whatever the trace holds."""

    json: bool = False
    compare: str | None = None

    def __post_init__(self) -> None:
        if self.compare not in (None, "tokens", "stages"):
            raise no_such_choice("run.compare", self.compare, ("tokens", "stages"))
