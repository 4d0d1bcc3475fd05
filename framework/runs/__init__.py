"""Runs of the command line: one module each, with `run(config, args)`. Only the command line calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework.config import ComponentConfig
from framework.runs.options import SweepOptions
from framework.server.options import ServerOptions

if TYPE_CHECKING:
    from framework.runs.engines import KeptWeights


@dataclass(frozen=True)
class Setting:
    """A value of the configuration and who set it.

    source  default, group file, plugin, file (of --config-dir), command line
    where   the file, and the word that chose it; or the word of the command line
    """

    key: str
    value: Any
    source: str
    where: str


class Incomplete(Exception):
    """Raised by a run that has done a part of its work: exit code 1. What was refused has been reported by then.

    metrics  of what was done, as the run would have returned them
    """

    def __init__(self, message: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.metrics = dict(metrics or {})


@dataclass(frozen=True)
class RunArgs:
    """What the command line alone says: texts, byte for byte, and the options of the chosen run.

    prompt, system  the text itself; `@file` has been read by now
    target          what a run such as `check` is about
    bench           the workload of `run=bench`, with its options
    server          keys `server.*`, for `run=serve`
    sweep           keys `sweep.*`, for the command line
    kept            in a sweep, the weights that a job may take over and leave; None in a run of its own
    command         the command line as it can be typed again, empty when there was none
    typed           {key: word} of its words in their order, empty when there was none
    settings        who set which value; empty when there was no command line
    """

    prompt: str | None = None
    system: str | None = None
    prompts_file: str | None = None
    output: str | None = None
    target: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    bench: ComponentConfig = field(default_factory=lambda: ComponentConfig("throughput"))
    server: ServerOptions = field(default_factory=ServerOptions)
    sweep: SweepOptions = field(default_factory=SweepOptions)
    kept: KeptWeights | None = None
    command: str = ""
    typed: Mapping[str, str] = field(default_factory=dict)
    settings: Callable[[], Sequence[Setting]] = tuple
