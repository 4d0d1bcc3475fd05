"""What a replay finds: where two runs of one row differ, and which stage is the first to do something else.

Pure data and comparisons of trails; `engine.replaying` executes and asks, `run=replay` reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from framework.config import SamplerConfig, StageConfig
from framework.sampling.trail import ARGMAX, LOGITS, SEED, Trail

GRAMMAR_MASK = "grammar mask"


@dataclass(frozen=True)
class Unlike:
    """stage: a stage of the sampler, or `seed`, `logits`, `argmax`, `grammar mask`. how: what is unlike about it."""

    stage: str
    how: str


@dataclass(frozen=True)
class Difference:
    """A row of a step that did something else than was recorded.

    line      of the trace, which is that of the step
    position  of the token that the row draws, in prompt and output
    stage     the first one that differs, None where nothing tells which it is; how: what is known of it
    recorded, now  tokens; None: the row ended with an error, or drew nothing
    """

    step: int
    line: int
    request: str
    position: int
    stage: str | None
    how: str
    recorded: int | None
    now: int | None


def first_unlike(recorded: Trail, now: Trail) -> Unlike | None:
    """The first stage in which two trails of one row differ, None where they are equal."""
    if recorded[0][0] != now[0][0]:  # a row that draws no more has no use for its seed
        recorded, now = ([entry for entry in trail if entry[0] != SEED] for trail in (recorded, now))
    then_keys, now_keys = [key for key, _ in recorded], [key for key, _ in now]
    for (then_key, then_value), (now_key, now_value) in zip(recorded, now, strict=False):
        if then_key == now_key:
            if then_value != now_value:
                return Unlike(then_key, _how(then_key, then_value, now_value))
        elif _picks(recorded, then_key) and _picks(now, now_key):
            if ARGMAX in (then_key, now_key) and then_value == now_value:  # a pipeline that is greedy does the same
                continue
            return Unlike(now_key, f"it picks the token, in the place of {then_key}")
        elif then_key not in now_keys:
            return Unlike(then_key, "it changed the row then, and does not now")
        elif now_key not in then_keys:
            return Unlike(now_key, "it changes the row now, and did not then")
        else:
            return Unlike(now_key, f"it runs before {then_key} now, and ran behind it then")
    return None


def _picks(trail: Trail, key: str) -> bool:
    return key == trail[-1][0]


def _how(key: str, then: str | int, now: str | int) -> str:
    if key == SEED:
        return f"the request draws with another seed: {int(str(then), 16)} then, {int(str(now), 16)} now"
    if key == LOGITS:
        return "the model's logits are others: weights, model, attention, backend or threads"
    if isinstance(then, int):
        what = "finds another best token of" if key == ARGMAX else "picks another token of"
        return f"it {what} equal logits and limits: {then} then, {now} now"
    return "from equal values it makes others"


def unlike_configs(recorded: SamplerConfig, now: SamplerConfig) -> list[str]:
    """What two pipelines do not have in common, a sentence each."""
    then_stages, now_stages = _by_key(recorded.stages), _by_key(now.stages)
    found = [f"{key} is gone" for key in then_stages if key not in now_stages]
    found += [f"{key} is new" for key in now_stages if key not in then_stages]
    common = [key for key in then_stages if key in now_stages]
    for key in common:
        then_one, now_one = then_stages[key], now_stages[key]
        if then_one.name != now_one.name:
            found.append(f"{key} is {now_one.name}, and was {then_one.name}")
        elif dict(then_one.options) != dict(now_one.options):
            found.append(f"{key} has {_options(now_one)}, and had {_options(then_one)}")
    if common != (order := [key for key in now_stages if key in then_stages]):
        found.append(f"the order is {', '.join(order)}, and was {', '.join(common)}")
    return found


def _by_key(stages: Sequence[StageConfig]) -> Mapping[str, StageConfig]:
    return {stage.key: stage for stage in stages}


def _options(stage: StageConfig) -> str:
    return ", ".join(f"{key}={value}" for key, value in stage.options.items()) or "no options"
