"""Repetitions of a sweep: every combination again with other seeds, the same ones in each, so that they can be paired.

`sweep.repetitions=3` becomes the swept word `sweep.repetition=0,1,2` before Hydra sees it, and a job adds its number to
every seed that its configuration has. The command line calls both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from framework.config import Config
from framework.errors import ConfigError
from framework.runs import RunArgs

KEY, NUMBER = "sweep.repetitions", "sweep.repetition"


def spread_repetitions(words: Sequence[str]) -> list[str]:
    """The words with the number of repetitions spelled out; first of all, so that each is a round over all
    combinations: what drifts while a sweep runs (heat, neighbours) then meets all of them alike."""
    given = [word for word in words if word.lstrip("+").startswith(f"{KEY}=")]
    if not given:
        return list(words)
    if any(word.lstrip("+").startswith(f"{NUMBER}=") for word in words):
        raise ConfigError(f"{KEY} and {NUMBER} are both given. Use one of them")
    value = given[-1].partition("=")[2]
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{KEY}={value} must be a number, 1 or more")
    numbers = ",".join(map(str, range(int(value))))
    return [f"++{NUMBER}={numbers}", *(word for word in words if word not in given)]


def with_seeds_of(number: int | None, config: Config, args: RunArgs) -> tuple[Config, RunArgs]:
    """What repetition `number` runs: every seed is the configured one plus `number`, an engine without one has
    `number`. None: as configured."""
    if number is None:
        return config, args
    sampler, bench = config.sampler, args.bench
    if sampler.params.get("seed") is not None:
        sampler = replace(sampler, params={**sampler.params, "seed": sampler.params["seed"] + number})
    if isinstance(bench.options.get("seed"), int):
        bench = replace(bench, options={**bench.options, "seed": bench.options["seed"] + number})
    engine = replace(config.engine, seed=(config.engine.seed or 0) + number)
    return replace(config, engine=engine, sampler=sampler), replace(args, bench=bench)
