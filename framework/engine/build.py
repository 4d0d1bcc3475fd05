"""From a `Config` to a running engine: the one place where all parts meet.

Order: read the checkpoint's header, choose parts, load weights, measure memory, make the rest.
Nothing below this module sees a `Config`, and nothing here runs once the engine is built.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from framework.engine.admission import Admission, Limits
from framework.engine.core import EngineCore
from framework.engine.engine import Engine
from framework.errors import CheckpointError, ConfigError, NotBuiltError, RequestError
from framework.interfaces import (
    AttentionContext,
    BackendContext,
    KVGroup,
    ModelContext,
    SchedulerContext,
    StageContext,
    StageSpec,
)
from framework.nulls import NoConnector
from framework.plugins import Registry, registry
from framework.request import SamplingParams

if TYPE_CHECKING:
    from framework.config import ComponentConfig, Config
    from framework.interfaces import AttentionBackend, Backend, Checkpoint, LayerSpec, Model

_log = logging.getLogger("framework")
_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass
class _Parts:
    """What the steps of a build hand to each other."""

    config: Config
    registry: Registry
    checkpoint: Checkpoint
    max_model_len: int
    backend: Backend
    seconds: dict[str, float]


def build_engine(config: Config, plugins: Registry | None = None) -> Engine:
    """An engine for `config`. Raises ConfigError, PluginError, CheckpointError or NotBuiltError before weights load,
    wherever the cause can be known by then."""
    from framework.checkpoint import open_checkpoint
    from framework.tokenizer import Tokenizer

    start = perf_counter()
    plugins = plugins or registry()
    checkpoint, loader = open_checkpoint(config.model, config.engine.load_format, plugins)
    max_model_len = _max_model_len(config, checkpoint)
    model_name = _model_name(config, checkpoint, plugins)
    backend = _build_backend(config, plugins)
    parts = _Parts(config, plugins, checkpoint, max_model_len, backend, {"open": perf_counter() - start})
    tokenizer = _timed(parts, "tokenizer", lambda: Tokenizer.of(checkpoint))
    model, layers = _timed(parts, "load", lambda: _build_model(parts, model_name, loader))
    engine = _assemble(parts, model, model_name, layers, tokenizer)
    parts.seconds["total"] = perf_counter() - start
    _log.info(_ready(engine.facts))
    return engine


def _ready(facts: Mapping[str, Any]) -> str:
    """What was built, in one line."""
    tokens, size = (facts["num_blocks"] - 1) * facts["block_size"], facts["kv_bytes"] / 1e6
    return (
        f"{facts['model']} in {facts['dtype']} on {facts['backend']}, attention {facts['attention']}; KV cache of "
        f"{tokens} tokens ({size:.0f} MB at most); ready in {facts['seconds']['total']:.1f} s"
    )


def _timed(parts: _Parts, name: str, make: Any) -> Any:
    start = perf_counter()
    made = make()
    parts.seconds[name] = perf_counter() - start
    return made


# --------------------------------------------------------------------------------------------- before the weights


def _max_model_len(config: Config, checkpoint: Checkpoint) -> int:
    limit = checkpoint.config.get("max_position_embeddings")
    asked = config.engine.max_model_len
    if asked is None:
        if limit is None:
            raise ConfigError(
                f"{checkpoint.location} states no max_position_embeddings; say engine.max_model_len=NUMBER"
            )
        return int(limit)
    if limit is not None and asked > limit:
        raise ConfigError(
            f"engine.max_model_len={asked} is more than the {limit} positions that {checkpoint.location} was made for; "
            f"use at most {limit}"
        )
    return asked


def _model_name(config: Config, checkpoint: Checkpoint, plugins: Registry) -> str:
    """The model plugin: named in the config, or the one that provides the checkpoint's architecture."""
    if config.model.name != "auto":
        return plugins.spec("model", config.model.name).name
    architectures = checkpoint.architectures
    if not architectures:
        raise CheckpointError(f"{checkpoint.location}: config.json names no architectures; say model=NAME")
    return plugins.provider("model", architectures[0]).name


def _component(plugins: Registry, kind: str, chosen: ComponentConfig) -> tuple[str, Any, Any]:
    """(name, class, checked options) of a part chosen by name or by `auto`."""
    spec = plugins.auto(kind) if chosen.name == "auto" else plugins.spec(kind, chosen.name)
    return spec.name, plugins.load_target(kind, spec.name), plugins.build_options(kind, spec.name, chosen.options)


def _build_backend(config: Config, plugins: Registry) -> Backend:
    _, target, options = _component(plugins, "backend", config.backend)
    e = config.engine
    return target(options, BackendContext(e.dtype, e.batch_invariant, e.graphs))


# ------------------------------------------------------------------------------------------------- model and memory


def _build_model(parts: _Parts, name: str, loader: Any) -> tuple[Model, list[LayerSpec]]:
    backend, checkpoint = parts.backend, parts.checkpoint
    target = parts.registry.load_target("model", name)
    seed = parts.config.engine.seed or 0
    weights = loader.open(checkpoint, dtype=backend.dtype, device=backend.device, seed=seed)
    try:
        ctx = ModelContext(backend, weights, backend.dtype, backend.device, parts.max_model_len)
        model = target(checkpoint.config, ctx)
        left = [n for n in weights.unused() if not any(re.search(p, n) for p in target.ignored_weights)]
    finally:
        weights.close()
    if left:
        raise CheckpointError(
            f"{checkpoint.location}: {len(left)} tensors are not used by model '{name}', {left[0]} among them; "
            "the checkpoint is of another architecture than its config says"
        )
    return model, ctx.layers


def _check_attention(
    name: str, attention: AttentionBackend, parts: _Parts, layers: list[LayerSpec], block: int
) -> None:
    """Refuses a choice outside of the plugin's capabilities, naming both sides."""
    caps, dtype = attention.caps, str(parts.backend.dtype).removeprefix("torch.")
    if not caps.any_block_size and block not in caps.block_sizes:
        sizes = ", ".join(map(str, caps.block_sizes))
        raise ConfigError(f"kv_cache.block_size={block}: attention={name} serves {sizes}")
    if dtype not in caps.dtypes:
        raise ConfigError(f"engine.dtype={dtype}: attention={name} serves {', '.join(caps.dtypes)}")
    if parts.config.engine.batch_invariant and not caps.batch_invariant:
        raise ConfigError(f"engine.batch_invariant=true: attention={name} does not offer it; choose another attention")
    for layer in layers:
        if caps.head_dims and layer.head_dim not in caps.head_dims:
            raise ConfigError(f"attention={name} does not serve head_dim {layer.head_dim}; choose another attention")
        if layer.window is not None and not caps.window:
            raise ConfigError(f"attention={name} does not serve sliding windows; choose another attention")


def _num_blocks(parts: _Parts, block_size: int, block_bytes: int) -> int:
    """Blocks of the pool, the null block included: as configured, else what the backend gives in memory."""
    kv = parts.config.kv_cache
    if kv.num_blocks is not None:
        return kv.num_blocks
    per_token = -(-block_bytes // block_size)
    available = parts.backend.kv_bytes_available(parts.max_model_len, per_token, kv.memory_fraction)
    blocks = available // block_bytes
    if blocks < 2:
        raise ConfigError(
            f"only {available} bytes are there for the KV cache and one block takes {block_bytes}; free memory, "
            "or set kv_cache.num_blocks or kv_cache.memory_fraction"
        )
    return int(blocks)


def _block_size(parts: _Parts, target: Any) -> int:
    size = parts.config.kv_cache.block_size
    return int(target.caps.block_sizes[0]) if size is None else size


# ----------------------------------------------------------------------------------------------------- the rest


def _assemble(parts: _Parts, model: Model, model_name: str, layers: list[LayerSpec], tokenizer: Any) -> Engine:
    from framework.worker.model_runner import ModelRunner
    from framework.worker.request_table import RequestTable

    config, backend, s = parts.config, parts.backend, parts.config.scheduler
    name, target, options = _component(parts.registry, "attention", config.attention)
    block_size = _block_size(parts, target)
    groups = _groups(layers, block_size)
    attention = target(options, AttentionContext(
        backend, block_size, backend.dtype, s.max_num_seqs, s.max_num_batched_tokens, parts.max_model_len,
        config.engine.batch_invariant,
    ))  # fmt: skip
    _check_attention(name, attention, parts, layers, block_size)
    specs = [attention.kv_spec(layer) for layer in layers]
    block_bytes = sum(spec.block_bytes for spec in specs)
    num_blocks = _num_blocks(parts, block_size, block_bytes)
    kv = backend.allocate_kv(specs, num_blocks)
    attention.bind(layers, kv)
    table = RequestTable(s.max_num_seqs + 1, parts.max_model_len, groups, backend.device, backend.step_ops)
    eos = eos_token_ids(parts.checkpoint, tokenizer)
    pipeline = _build_pipeline(parts, model, table, eos)
    table.allocate()
    runner = ModelRunner(
        model,
        backend,
        {g.name: attention for g in groups},
        groups,
        kv,
        specs,
        table,
        pipeline,
        s.max_num_batched_tokens,
    )
    _, executor_target, executor_options = _component(parts.registry, "executor", config.executor)
    executor = executor_target(executor_options, runner)
    scheduler = _build_scheduler(parts, groups, num_blocks, executor.max_in_flight)
    executor.start()
    limits = Limits(model.vocab_size, parts.max_model_len, frozenset(eos), config.policy.name, config.engine.seed)
    admission = Admission(limits, tokenizer, pipeline, default_params(parts.config, parts.checkpoint))
    _check_defaults(admission, parts.config)
    facts = {
        "backend": backend.name,
        "attention": name,
        "model": model_name,
        "dtype": str(backend.dtype).removeprefix("torch."),
        "max_model_len": parts.max_model_len,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "kv_bytes": num_blocks * block_bytes,
        "seconds": parts.seconds,
    }
    return Engine(config, EngineCore(scheduler, executor, parts.registry.events), admission, tokenizer, facts)


def _groups(layers: list[LayerSpec], block_size: int) -> tuple[KVGroup, ...]:
    """KV groups in the order in which the model's layers name them."""
    names = list(dict.fromkeys(layer.group for layer in layers))
    for name in names:
        if name != "full":
            raise NotBuiltError(f"KV group '{name}' is not built yet; only full attention is")
    return tuple(KVGroup(n, "full", block_size, None, tuple(x.index for x in layers if x.group == n)) for n in names)


def _build_pipeline(parts: _Parts, model: Model, table: Any, eos: tuple[int, ...]) -> Any:
    from framework.sampling.pipeline import build_pipeline

    def context(key: str, spec: StageSpec) -> StageContext:
        table.declare(key, spec.fields)
        return StageContext(
            device=parts.backend.device,
            vocab_size=model.vocab_size,
            num_rows=table.num_rows,
            max_num_logits=table.num_rows,
            eos_token_ids=eos,
            column=lambda name: table.column(key, name),
        )

    required = frozenset({"batch_invariant"} if parts.config.engine.batch_invariant else ())
    return build_pipeline(parts.config.sampler, parts.registry, context, required=required)


def _build_scheduler(parts: _Parts, groups: tuple[KVGroup, ...], num_blocks: int, max_in_flight: int) -> Any:
    s, plugins = parts.config.scheduler, parts.registry
    _, policy_target, policy_options = _component(plugins, "policy", parts.config.policy)
    ctx = SchedulerContext(
        groups=groups,
        num_blocks=num_blocks,
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_model_len=parts.max_model_len,
        chunked_prefill=s.chunked_prefill,
        prefix_caching=parts.config.kv_cache.prefix_caching,
        preemption=s.preemption,
        policy=policy_target(policy_options, None),
        connector=NoConnector(),
        max_in_flight=max_in_flight,
    )
    return plugins.load_target("scheduler", s.name)(plugins.build_options("scheduler", s.name, s.options), ctx)


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a request: of generation_config.json and config.json, else the tokenizer's."""
    found: list[int] = []
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found = [tokenizer.eos_token_id]
    return tuple(dict.fromkeys(found))


def _check_defaults(admission: Admission, config: Config) -> None:
    """Refuses configured defaults that this engine cannot serve, as it would refuse a request that names them.

    What only generation_config.json says refuses nothing; the log tells what of it has no effect here.
    """
    for name in _GENERATION_KEYS:
        value = getattr(admission.defaults, name)
        if name in config.sampler.params or value == SamplingParams.defaults()[name]:
            continue
        try:
            admission.check(SamplingParams(**{name: value}))
        except (NotBuiltError, RequestError) as e:
            _log.warning("%s of generation_config.json has no effect: %s", name, e)
    try:
        admission.check(admission.defaults)
    except NotBuiltError as e:
        raise NotBuiltError(str(e).replace("SamplingParams.", "sampler.", 1)) from None
    except RequestError as e:
        raise ConfigError(f"defaults of sampler.<param>: {e}") from None


def default_params(config: Config, checkpoint: Checkpoint) -> SamplingParams:
    """Where the caller passes none: `sampler.<param>` over generation_config.json over the class defaults."""
    stored = {k: v for k, v in checkpoint.generation_config.items() if k in _GENERATION_KEYS and v is not None}
    try:
        params = SamplingParams(**{**stored, **config.sampler.params})
    except (TypeError, ValueError) as e:
        raise ConfigError(f"defaults of sampler.<param> and generation_config.json: {e}") from None
    # What only the checkpoint says is not the caller's word: it never makes a pipeline refuse.
    object.__setattr__(params, "named", frozenset(config.sampler.params))
    return params
