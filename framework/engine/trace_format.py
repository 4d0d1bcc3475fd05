"""What lines of a trace hold of parameters and configurations, to JSON and back.

`trace` writes with it and `recording` reads; what the lines are is said in `docs/runs.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from framework.config import (
    ComponentConfig,
    Config,
    EngineOptions,
    GrammarConfig,
    KVCacheConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    StageConfig,
)
from framework.request import OutputKind, SamplingParams, StructuredOutputsParams

TRACE_FORMAT = 2
_PARTS = {
    "model": ModelConfig, "engine": EngineOptions, "kv_cache": KVCacheConfig, "scheduler": SchedulerConfig,
    "grammar": GrammarConfig,
}  # fmt: skip


def params_line(params: SamplingParams) -> dict[str, Any]:
    """{"params": fields that are not the class defaults, "named": fields that the caller wrote}.

    Where a field holds what JSON cannot say, "params" is None and "unwritten" the reason.
    """
    values = params.unlike_defaults()
    if isinstance(asked := values.get("structured_outputs"), StructuredOutputsParams):
        values["structured_outputs"] = {f.name: v for f in fields(asked) if (v := getattr(asked, f.name)) is not None}
    if isinstance(kind := values.get("output_kind"), OutputKind):
        values["output_kind"] = kind.value
    named = sorted(params.named)
    if reason := _unwritable(values):
        return {"params": None, "unwritten": reason, "named": named}
    return {"params": values, "named": named}


def read_params(values: Mapping[str, Any], named: list[str]) -> SamplingParams:
    """The parameters of a request's line. Raises ValueError or TypeError for what are none."""
    values = dict(values)
    if isinstance(bias := values.get("logit_bias"), dict):  # JSON has texts for keys
        values["logit_bias"] = {int(key): value for key, value in bias.items()}
    params = SamplingParams(**values)
    object.__setattr__(params, "named", frozenset(named))  # the defaults that were not written are not named
    return params


def config_line(config: Config) -> dict[str, Any] | None:
    """The configuration as JSON has it, None where a plugin's options hold what it has not."""
    values = asdict(config)
    return None if _unwritable(values) else values


def read_config(values: Mapping[str, Any]) -> Config:
    """The configuration of a trace's first line. Raises ConfigError, TypeError or KeyError for what is none."""
    parts: dict[str, Any] = {}
    for name, value in values.items():
        if name in _PARTS:
            parts[name] = _PARTS[name](**value)
        elif name == "sampler":
            stages = tuple(StageConfig(**stage) for stage in value["stages"])
            parts[name] = SamplerConfig(**{**value, "stages": stages})
        elif isinstance(value, dict):
            parts[name] = ComponentConfig(**value)
        else:
            parts[name] = value
    return Config(**parts)


def _unwritable(values: Any) -> str | None:
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None
