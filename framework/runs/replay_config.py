"""The configuration of a replay: that of the recording, with what the command line says beside it.

A word counts for its key alone, whatever the files of this machine say. Words about the schedule are refused: it is the
recorded one. `run=replay` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from framework.config import Config, SamplerConfig, StageConfig
from framework.engine.recording import RecordedRequest, Recording
from framework.errors import ConfigError
from framework.request import SamplingParams
from framework.rng import MASK64, child_seed

_RECORDED = "the schedule is the recorded one. Leave the word out"
_FIXED = {
    "scheduler": _RECORDED, "policy": _RECORDED, "kv_cache": _RECORDED, "kv_connector": _RECORDED,
    "spec_decode": _RECORDED, "engine.async_scheduling": "steps are executed one by one. Leave the word out",
    "engine.max_model_len": _RECORDED, "engine.trace_prompts": "it writes no trace. Leave the word out",
    "engine.trace_stages": "it belongs to the recording. Leave the word out",
}  # fmt: skip
_WHOLE = ("backend", "attention", "executor", "grammar")
_STAGES = ("sampler/stage", "sampler.stages")


def replay_config(recording: Recording, now: Config, typed: Mapping[str, str], base: Callable[[], Config]) -> Config:
    """The configuration to build. Raises ConfigError for words that a replay cannot follow.

    now    what the command line composes here; of it only the keys of `typed` ({key: word}) count
    base   composes what stands here without any word
    """
    for key, word in typed.items():
        for fixed, way_out in _FIXED.items():
            if key == fixed or key.startswith(f"{fixed}."):
                raise ConfigError(f"{word} means nothing to run=replay; {way_out}")
    config = _as_recorded(recording)
    for key in typed:
        group, _, name = key.partition(".")
        if group in _WHOLE:
            config = replace(config, **{group: getattr(now, group)})
        elif group in ("engine", "model"):
            part, own = getattr(config, group), getattr(now, group)
            config = replace(config, **{group: replace(part, **{name or "name": getattr(own, name or "name")})})
    return replace(config, sampler=_sampler(config.sampler, now.sampler, typed, base))


def _as_recorded(recording: Recording) -> Config:
    """The recorded configuration, with the numbers that the machine had decided."""
    config, facts = recording.config, recording.facts
    if config.kv_connector.name != "none":
        raise ConfigError(
            f"trace={recording.path}: recorded with kv_connector={config.kv_connector.name}, and no trace holds what a "
            "connector brings. Record with kv_connector=none"
        )
    swaps = config.scheduler.preemption == "swap"
    return replace(
        config,
        trace=None,
        engine=replace(config.engine, max_model_len=facts["max_model_len"], trace_stages=False),
        scheduler=replace(config.scheduler, max_num_batched_tokens=facts["max_num_batched_tokens"]),
        kv_cache=replace(
            config.kv_cache,
            num_blocks=facts["num_blocks"],
            block_size=facts["block_size"],
            num_swap_blocks=facts["num_swap_blocks"] if swaps else None,
        ),
    )


# --------------------------------------------------------------------------------------------------------- sampler


def _sampler(
    recorded: SamplerConfig, now: SamplerConfig, typed: Mapping[str, str], base: Callable[[], Config]
) -> SamplerConfig:
    made = recorded
    if "sampler" in typed:
        made = replace(made, name=now.name, stages=now.stages)
    elif any(key == start or key.startswith(f"{start}.") for key in typed for start in _STAGES):
        made = replace(made, stages=_stages(recorded.stages, now.stages, base().sampler.stages))
    if "sampler.logprobs_mode" in typed:
        made = replace(made, logprobs_mode=now.logprobs_mode)
    params = {key: now.params[key] for key in typed_params(typed) if key in now.params}
    return replace(made, params={**made.params, **params})


def typed_params(typed: Mapping[str, str]) -> list[str]:
    """Parameters of requests that the words set, as in `sampler.temperature=0.5`."""
    names = {f.name for f in fields(SamplingParams)} - {"stages"}
    keys = [key.removeprefix("sampler.").partition(".")[0] for key in typed if key.startswith("sampler.")]
    return [key for key in dict.fromkeys(keys) if key in names]


def _stages(
    recorded: Sequence[StageConfig], now: Sequence[StageConfig], base: Sequence[StageConfig]
) -> tuple[StageConfig, ...]:
    """The recorded stages with what the words have changed of those that stand here without any."""
    before, after = {one.key: one for one in base}, {one.key: one for one in now}
    order_before, order_after = ([key for key in stages if key in (before.keys() & after.keys())]
                                 for stages in (before, after))  # fmt: skip
    moved = {a for a, b in zip(order_before, order_after, strict=True) if a != b}
    changed = {key for key, one in after.items() if before.get(key) != one} | moved
    made = [one for one in recorded if one.key not in changed and not (one.key in before and one.key not in after)]
    keys = list(after)
    for key in keys:
        if key in changed:
            earlier = keys[: keys.index(key)]
            place = max((at + 1 for at, one in enumerate(made) if one.key in earlier), default=0)
            made.insert(place, after[key])
    return tuple(made)


# -------------------------------------------------------------------------------------------------------- requests


def changed_request(
    recording: Recording, config: Config, typed: Mapping[str, str]
) -> Callable[[RecordedRequest], RecordedRequest]:
    """What makes of a recorded request one with the parameters and the seed that the words give it."""
    values = {key: config.sampler.params[key] for key in typed_params(typed) if key in config.sampler.params}
    reseeded = "engine.seed" in typed

    def changed(recorded: RecordedRequest) -> RecordedRequest:
        params = recorded.params.replace(**values) if values else recorded.params
        seed = recorded.seed
        if "seed" in values:
            seed = child_seed(values["seed"] & MASK64, recorded.sample_index)
        elif reseeded and config.engine.seed is not None and recorded.params.seed is None:
            own = child_seed(config.engine.seed & MASK64, int(recorded.arrival) + 1)
            seed = child_seed(own, recorded.sample_index)
        return replace(recorded, params=params, seed=seed)

    return changed


def what_differs(recorded: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """{key: (then, now)} of what the engine is built from, the sampler's stages aside."""
    found = {}
    for part in ("model", "engine", "backend", "attention", "executor", "grammar"):
        then_part, now_part = getattr(recorded, part), getattr(now, part)
        for f in fields(then_part):
            pair = getattr(then_part, f.name), getattr(now_part, f.name)
            if pair[0] != pair[1]:
                found[f"{part}.{f.name}"] = pair
    return found
