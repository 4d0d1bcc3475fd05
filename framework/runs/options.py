"""Options of the runs, `run.KEY` on the command line, a dataclass each. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from framework.config import check_count
from framework.errors import ConfigError


@dataclass(frozen=True)
class ChatOptions:
    """template: what the chat template reads beside the messages, such as run.template.enable_thinking=false."""

    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExplainOptions:
    """json: one JSON object instead of tables. build: make the engine too, for what only then is known.

    capabilities: what each stage of the sampler needs and keeps as well; JSON has it always
    """

    json: bool = False
    build: bool = False
    capabilities: bool = False


@dataclass(frozen=True)
class CheckOptions:
    """json: one JSON object instead of a report."""

    json: bool = False


@dataclass(frozen=True)
class NewOptions:
    """folder: where the package is written; None: a folder of its name here."""

    folder: str | None = None


@dataclass(frozen=True)
class SweepOptions:
    """Keys `sweep.*`.

    repetitions   of every combination of a sweep; the command line spells them out as values of `repetition`
    repetition    added to every seed of the job; None: seeds as configured
    keep_weights  from one job of a process to the next, where their keys are the same
    objective     the figure that a job returns to a sweeper which searches; None: none
    """

    repetitions: int = 1
    repetition: int | None = None
    keep_weights: bool = True
    objective: str | None = None

    def __post_init__(self) -> None:
        if self.repetitions != 1:
            raise ConfigError(
                f"sweep.repetitions={self.repetitions} is a word of the command line, beside --multirun. "
                "Type it there, or leave it at 1"
            )
        check_count("sweep.repetition", self.repetition, 0)


@dataclass(frozen=True)
class BenchOptions:
    """json: one JSON object instead of tables. warmup, rounds: untimed and timed passes. plot: an SVG file.

    profile: a trace of a few steps of one more pass, in Chrome's JSON
    """

    json: bool = False
    warmup: int = 1
    rounds: int = 3
    plot: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("rounds", 1)):
            check_count(f"run.{name}", getattr(self, name), least)
        if self.plot is not None and not self.plot.endswith(".svg"):
            raise ConfigError(f"run.plot={self.plot}: plots are SVG. Name a file that ends in .svg")
        if self.profile is not None and not self.profile.endswith(".json"):
            raise ConfigError(f"run.profile={self.profile}: traces are JSON. Name a file that ends in .json")


# ------------------------------------------------------------------------ workloads of run=bench, `bench.KEY`

SET_BY_WORKLOADS = {
    "sampler.max_tokens": "the keys under bench say how long an answer is",
    "sampler.n": "a request of this workload has one completion",
    "sampler.ignore_eos": "a request of this workload ends by its length alone",
    "sampler.seed": "the seed of a request follows from the workload",
    "sampler.detokenize": "the workload says whether text is made",
    "sampler.output_kind": "only what is finished counts",
}
"""Parameters that our workloads choose themselves, and why another value does nothing."""


@dataclass(frozen=True)
class ThroughputOptions:
    """Many requests at once, or arriving by chance.

    input_len, output_len          tokens of a request; with a *_min, drawn evenly from there up to them
    rate                           requests a second, arrivals of a Poisson process; null = all at once
    seed                           of lengths, tokens and arrivals, and of the requests' draws
    detokenize                     whether text is made too
    """

    num_prompts: int = 16
    input_len: int = 128
    input_len_min: int | None = None
    output_len: int = 64
    output_len_min: int | None = None
    rate: float | None = None
    seed: int = 0
    detokenize: bool = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "input_len_min", "output_len", "output_len_min"):
            check_count(f"bench.{name}", getattr(self, name), 1)
        for name in ("input_len", "output_len"):
            low, high = getattr(self, f"{name}_min"), getattr(self, name)
            if low is not None and low > high:
                raise ConfigError(f"bench.{name}_min={low} is above bench.{name}={high}. Lower it, or leave it out")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"bench.rate={self.rate} must be above 0, requests a second. Use null for all at once")


@dataclass(frozen=True)
class LatencyOptions:
    """One request at a time, `num_prompts` of each input length."""

    num_prompts: int = 4
    input_lens: list[int] = field(default_factory=lambda: [16, 128, 512])
    output_len: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "output_len"):
            check_count(f"bench.{name}", getattr(self, name), 1)
        for length in self.input_lens:
            check_count("bench.input_lens", length, 1)
        if not self.input_lens:
            raise ConfigError("bench.input_lens=[] holds no length. Write bench.input_lens=[128]")


@dataclass(frozen=True)
class StartupOptions:
    """A fresh process a round, from its start to its first token."""

    input_len: int = 16

    def __post_init__(self) -> None:
        check_count("bench.input_len", self.input_len, 1)
