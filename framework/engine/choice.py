"""Which parts an engine is made of, and whether they go together: everything that is known before weights load.

Reads the checkpoint's header, resolves every name, solves the sampler's composition and holds each choice against the
capabilities of the others. A conflict is an error that names both sides and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from framework.engine.admission import Admission, Limits
from framework.engine.attending import check_layers, unfit
from framework.engine.connecting import check_connector
from framework.engine.defaults import check_defaults, default_params, eos_token_ids
from framework.engine.families import buckets_of, check_model, model_spec
from framework.engine.grammars import grammars_of
from framework.engine.kv_groups import kv_groups
from framework.errors import CheckpointError, ConfigError
from framework.interfaces import BackendContext, StageContext, StageSpec
from framework.rng import stage_stream

if TYPE_CHECKING:
    from framework.config import ComponentConfig, Config
    from framework.engine.loaded import Loaded
    from framework.interfaces import Backend, Bucket, Checkpoint, KVGroup, LayerSpec, Loader
    from framework.plugins import Registry
    from framework.sampling.pipeline import SamplerPipeline
    from framework.tokenizer import Tokenizer
    from framework.worker.request_table import RequestTable

# A step at a time, and the host has its tokens before the next one is made.
_SYNCHRONOUS = frozenset({"host_tokens", "exact_lens"})
_ROW_BYTES, _TOKEN_BYTES = 256, 32
"""What a row takes beside its token ids and block table, and a token of a step in the step's buffers, about."""
_ALWAYS_ASKED_FOR = 1 << 30
"""Bytes that are asked for without a look at what is free: a system that counts its caches as used has them still."""


@dataclass(frozen=True)
class Part:
    """A component chosen by name: its class and its checked options."""

    name: str
    target: Any
    options: Any

    @classmethod
    def choose(cls, plugins: Registry, kind: str, chosen: ComponentConfig, device: str | None = None) -> Part:
        """device: type of the backend's, for components that say which they serve."""
        return cls.named(
            plugins, kind, plugins.auto(kind, device).name if chosen.name == "auto" else chosen.name, chosen
        )

    @classmethod
    def named(cls, plugins: Registry, kind: str, name: str, chosen: ComponentConfig) -> Part:
        return cls(name, plugins.load_target(kind, name), plugins.build_options(kind, name, chosen.options))


@dataclass(frozen=True)
class Choice:
    """The parts, before any weight is read. layers: attention layers of the model, groups: the KV groups that they
    form; seconds: time of each step of the build so far."""

    config: Config
    checkpoint: Checkpoint
    loader: Loader
    max_model_len: int
    max_num_batched_tokens: int
    buckets: list[Bucket]
    block_size: int
    backend: Backend
    model: Part
    layers: Sequence[LayerSpec]
    groups: tuple[KVGroup, ...]
    attention: Part
    scheduler: Part
    policy: Any
    connector: Part | None
    executor: Part
    tokenizer: Tokenizer | None
    table: RequestTable
    pipeline: SamplerPipeline
    admission: Admission
    seconds: dict[str, float]


def choose(config: Config, plugins: Registry, loaded: Loaded | None = None) -> Choice:
    """Resolves and checks every part. Raises ConfigError, PluginError, CheckpointError or NotBuiltError.

    loaded  what an earlier engine read of the same checkpoint, for the same backend
    """
    from framework.checkpoint import open_checkpoint
    from framework.tokenizer import Tokenizer

    start = perf_counter()
    if loaded is None:
        checkpoint, loader = open_checkpoint(config.model, config.engine.load_format, plugins)
    else:
        checkpoint, loader = loaded.checkpoint, loaded.loader
    model, vocab_size = _model(config, checkpoint, plugins), _vocab_size(checkpoint)
    max_model_len = _max_model_len(config, checkpoint)
    backend = _backend(config, plugins) if loaded is None else loaded.backend
    layers = _layers(model, checkpoint, loader, backend, max_model_len) if loaded is None else loaded.layers
    attention = _attention(config, plugins, backend, model, layers)
    block_size = _block_size(config, attention)
    check_attention(attention, config, backend, block_size)
    groups = kv_groups(layers, block_size)
    max_num_batched_tokens = config.scheduler.max_num_batched_tokens or backend.max_num_batched_tokens
    _check_memory(config, backend, max_model_len, max_num_batched_tokens, groups)
    buckets = buckets_of(model.target, backend, config.scheduler.max_num_seqs, max_num_batched_tokens)
    policy = Part.choose(plugins, "policy", config.policy)
    opened = perf_counter()
    tokenizer = Tokenizer.of(checkpoint) if loaded is None else loaded.tokenizer
    seconds = {"open": opened - start, "tokenizer": perf_counter() - opened}
    eos = eos_token_ids(checkpoint, tokenizer, vocab_size)
    table = _table(config, backend, max_model_len, buckets)
    pipeline = _pipeline(config, plugins, backend, table, vocab_size, eos, tokenizer)
    limits = Limits(vocab_size, max_model_len, frozenset(eos), policy.name, config.engine.seed)
    connector = _connector(config, plugins)
    check_connector(connector, model.name, layers, groups)
    scheduler = _scheduler(config, plugins)
    admission = _admission(config, plugins, checkpoint, tokenizer, pipeline, limits, scheduler)
    seconds["total"] = perf_counter() - start
    return Choice(
        config=config, checkpoint=checkpoint, loader=loader, max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens, buckets=buckets, block_size=block_size, backend=backend,
        model=model, layers=layers, groups=groups, attention=attention, scheduler=scheduler,
        policy=policy.target(policy.options, None), connector=connector,
        executor=Part.choose(plugins, "executor", config.executor), tokenizer=tokenizer, table=table,
        pipeline=pipeline, admission=admission, seconds=seconds,
    )  # fmt: skip


def _table(config: Config, backend: Backend, max_model_len: int, buckets: list[Bucket]) -> RequestTable:
    from framework.worker.request_table import RequestTable

    num_rows = config.scheduler.max_num_seqs + 1
    return RequestTable(num_rows, max_model_len, backend.device, backend.step_ops, pools_stay=bool(buckets))


def _admission(
    config: Config, plugins: Registry, checkpoint: Checkpoint, tokenizer: Tokenizer | None, pipeline: SamplerPipeline,
    limits: Limits, scheduler: Part,
) -> Admission:  # fmt: skip
    """Admission of requests; the defaults that the config gives them are checked against it."""
    grammars = grammars_of(config, plugins, tokenizer, limits, scheduler)
    admission = Admission(limits, tokenizer, pipeline, default_params(config.sampler.params, checkpoint), grammars)
    check_defaults(admission, config.sampler.params)
    return admission


def _scheduler(config: Config, plugins: Registry) -> Part:
    name, options = config.scheduler.name, config.scheduler.options
    return Part(name, plugins.load_target("scheduler", name), plugins.build_options("scheduler", name, options))


def _connector(config: Config, plugins: Registry) -> Part | None:
    return None if config.kv_connector.name == "none" else Part.choose(plugins, "kv_connector", config.kv_connector)


def _model(config: Config, checkpoint: Checkpoint, plugins: Registry) -> Part:
    spec = model_spec(config, checkpoint, plugins)
    model = Part(spec.name, plugins.load_target("model", spec.name), None)
    check_model(model.name, model.target, config)
    return model


def _max_model_len(config: Config, checkpoint: Checkpoint) -> int:
    limit, asked = checkpoint.config.get("max_position_embeddings"), config.engine.max_model_len
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 2):
        raise CheckpointError(
            f"{checkpoint.location}: max_position_embeddings must be a whole number of at least 2, got {limit!r}. "
            "Correct config.json"
        )
    if asked is None:
        if limit is None:
            raise ConfigError(
                f"{checkpoint.location} states no max_position_embeddings; say engine.max_model_len=NUMBER"
            )
        return limit
    if limit is not None and asked > limit:
        raise ConfigError(
            f"engine.max_model_len={asked} is more than the {limit} positions that {checkpoint.location} was made for; "
            f"use at most {limit}"
        )
    return asked


def _vocab_size(checkpoint: Checkpoint) -> int:
    size = checkpoint.config.get("vocab_size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise CheckpointError(
            f"{checkpoint.location}: vocab_size must be a positive integer, got {size!r}. Correct config.json"
        )
    return size


def _backend(config: Config, plugins: Registry) -> Backend:
    part, e = Part.choose(plugins, "backend", config.backend), config.engine
    backend: Backend = part.target(part.options, BackendContext(e.dtype, e.batch_invariant, e.graphs))
    if e.batch_invariant and "batch_invariant" not in backend.caps.keeps:
        raise ConfigError(f"engine.batch_invariant=true: backend={part.name} does not offer it; choose another backend")
    return backend


def _layers(
    model: Part, checkpoint: Checkpoint, loader: Loader, backend: Backend, max_model_len: int
) -> Sequence[LayerSpec]:
    from framework.engine.outline import layers_of, names_of

    with names_of(checkpoint, loader, backend) as has:
        return layers_of(model.name, model.target, checkpoint, backend.dtype, max_model_len, has)


def _attention(config: Config, plugins: Registry, backend: Backend, model: Part, layers: Sequence[LayerSpec]) -> Part:
    """The plugin that was named, or the best one that serves the model's layers."""
    name, device = config.attention.name, backend.device.type
    if name == "auto":
        name = plugins.auto("attention", device, unfit(plugins, layers)).name
    part = Part.named(plugins, "attention", name, config.attention)
    misfit = plugins.misfit("attention", part.name, device)
    if misfit is not None:
        raise ConfigError(f"attention={part.name} with backend={backend.name}: {misfit}. Use attention=auto")
    check_layers(part, model.name, layers, plugins, device)
    return part


def _block_size(config: Config, attention: Part) -> int:
    size = config.kv_cache.block_size
    return int(attention.target.caps.block_sizes[0]) if size is None else size


def _check_memory(
    config: Config, backend: Backend, max_model_len: int, max_num_batched_tokens: int, groups: Sequence[KVGroup]
) -> None:
    """Refuses limits whose tables alone want more memory than there is."""
    row_bytes = 4 * (max_model_len + sum(-(-max_model_len // g.block_size) for g in groups)) + _ROW_BYTES
    seqs, tokens = config.scheduler.max_num_seqs, max_num_batched_tokens
    check_memory("engine.max_model_len", max_model_len, row_bytes // max_model_len, backend, max_model_len)
    check_memory("scheduler.max_num_seqs", seqs, row_bytes, backend, max_model_len)
    check_memory("scheduler.max_num_batched_tokens", tokens, _TOKEN_BYTES, backend, max_model_len)


def check_memory(key: str, count: int, bytes_each: int, backend: Backend, max_model_len: int) -> None:
    """ConfigError when `count` pieces do not fit in what is free.

    Said before anything is allocated: a system that promises more than it has ends the process later, without a word.
    """
    wanted = count * bytes_each
    if wanted <= _ALWAYS_ASKED_FOR:
        return
    free = backend.kv_bytes_available(max_model_len, 1, 1.0)
    if wanted > free:
        most = free // bytes_each
        way_out = f"Use {most} or less" if most > 1 else "Lower engine.max_model_len or kv_cache.block_size"
        raise ConfigError(
            f"{key}={count} wants {wanted / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free. {way_out}, or free memory"
        )


def check_attention(attention: Part, config: Config, backend: Backend, block_size: int) -> None:
    """Refuses a configuration outside of the plugin's capabilities."""
    name, caps, dtype = attention.name, attention.target.caps, str(backend.dtype).removeprefix("torch.")
    if not caps.any_block_size and block_size not in caps.block_sizes:
        sizes = ", ".join(map(str, caps.block_sizes))
        raise ConfigError(f"kv_cache.block_size={block_size}: attention={name} serves {sizes}")
    if dtype not in caps.dtypes:
        raise ConfigError(f"engine.dtype={dtype}: attention={name} serves {', '.join(caps.dtypes)}")
    if caps.needs_exact_lens and async_scheduling(config, backend)[0]:
        raise ConfigError(
            f"engine.async_scheduling=true: attention={name} needs exact lengths of every step on the host. "
            "Use engine.async_scheduling=false or another attention"
        )
    if config.engine.batch_invariant and not caps.batch_invariant:
        raise ConfigError(f"engine.batch_invariant=true: attention={name} does not offer it; choose another attention")


def _pipeline(
    config: Config,
    plugins: Registry,
    backend: Backend,
    table: RequestTable,
    vocab_size: int,
    eos: tuple[int, ...],
    tokenizer: Tokenizer | None,
) -> SamplerPipeline:
    from framework.sampling.pipeline import build_pipeline

    def context(key: str, spec: StageSpec) -> StageContext:
        table.declare(key, [field.sized(vocab_size) for field in spec.fields])
        return StageContext(
            device=backend.device,
            vocab_size=vocab_size,
            num_rows=table.num_rows,
            max_num_logits=table.num_rows,
            eos_token_ids=eos,
            column=lambda name: table.column(key, name),
            token_ids=table.token_ids,
            encode=None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False),
            stream=stage_stream(key),
        )

    is_async, _ = async_scheduling(config, backend)
    asked = {"batch_invariant": config.engine.batch_invariant, "async": is_async}
    required = frozenset(word for word, is_asked in asked.items() if is_asked)
    provided = frozenset() if is_async else _SYNCHRONOUS
    ops = getattr(backend, "sampler_ops", None)
    return build_pipeline(config.sampler, plugins, context, required=required, provided=provided, ops=ops)


def async_scheduling(config: Config, backend: Backend) -> tuple[bool, str]:
    """Whether the engine schedules ahead of the step that runs, and why."""
    if config.engine.async_scheduling is not None:
        return config.engine.async_scheduling, "as engine.async_scheduling says"
    # On the CPU the engine's own part of a step is below a hundredth of it: there is nothing to hide behind a thread.
    count = backend.max_in_flight
    return count > 1, f"backend {backend.name} takes {count} step{'s' * (count > 1)} at a time by itself"
