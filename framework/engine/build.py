"""From a `Config` to a running engine: the one place where all parts meet.

Order: choose and check every part (`choice`), load weights, measure memory, put the parts together. Nothing here runs
once the engine is built.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import perf_counter
from typing import TYPE_CHECKING, Any

from framework.engine.choice import Choice, async_scheduling, check_memory, choose
from framework.engine.connecting import connector_of
from framework.engine.core import EngineCore
from framework.engine.engine import Engine
from framework.engine.loaded import Loaded
from framework.engine.trace import Trace
from framework.engine.warming import profile, warm_up
from framework.errors import CheckpointError, ConfigError, PluginError, first_line
from framework.interfaces import AttentionContext, ModelContext, SchedulerContext
from framework.plugins import registry
from framework.worker.step_thread import StepThread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.interfaces import (
        AttentionBackend,
        Executor,
        KVConnector,
        KVGroup,
        KVSpec,
        LayerSpec,
        Model,
        Scheduler,
    )
    from framework.plugins import EventBus, Registry
    from framework.worker.model_runner import ModelRunner

_log = logging.getLogger("framework")
_SWAP_BYTES = 4 << 30
"""Host memory for preempted requests when nobody says how much; it is taken when the first one is swapped out."""


def build_engine(
    config: Config, plugins: Registry | None = None, loaded: Loaded | None = None, *, keep_logits: bool = False
) -> Engine:
    """An engine for `config`. Raises ConfigError, PluginError, CheckpointError or NotBuiltError, and before weights
    load wherever the cause can be known by then.

    loaded       weights of an earlier engine that serve this one as well
    keep_logits  steps tell what their stages did, and the model's logits, as `sampling.watched` says
    """
    plugins = plugins or registry()
    return build_chosen(choose(config, plugins, loaded), plugins, loaded, keep_logits=keep_logits)


def build_chosen(
    choice: Choice, plugins: Registry, loaded: Loaded | None = None, *, keep_logits: bool = False
) -> Engine:
    """An engine of what was chosen, once: a `Choice` holds parts of the engine that is made of it."""
    start, compiled = perf_counter(), choice.backend.compile_seconds
    config = choice.config
    trace = None if config.trace is None else Trace(config.trace, with_prompts=config.engine.trace_prompts)
    if keep_logits or config.engine.trace_stages:
        from framework.sampling.watched import WatchedPipeline

        choice = replace(choice, pipeline=WatchedPipeline(choice.pipeline, keep_logits=keep_logits))
    loading = perf_counter()
    loaded = loaded or _load(choice)
    choice.seconds["load"] = perf_counter() - loading
    attention = {group.name: _attention(choice) for group in choice.groups}
    profile(choice, loaded, attention)
    kv = _allocate(choice, loaded.layers, attention)
    events = plugins.events if trace is None else plugins.events.joined("trace", trace)
    engine = _assemble(choice, loaded, kv, plugins, events)
    choice.seconds["compile"] = choice.backend.compile_seconds - compiled
    choice.seconds["total"] += perf_counter() - start
    if trace is not None:
        trace.begin({**engine.facts, "versions": plugins.versions}, config, lambda: engine.core.last_output)
    _log.info(_ready(engine.facts))
    return engine


def _load(choice: Choice) -> Loaded:
    """The model with its weights, and the attention layers that it declared."""
    from torch import OutOfMemoryError

    backend, checkpoint, target = choice.backend, choice.checkpoint, choice.model.target
    seed = choice.config.engine.seed or 0
    weights = choice.loader.open(checkpoint, dtype=backend.dtype, device=backend.device, seed=seed)
    try:
        ctx = ModelContext(backend, weights, backend.dtype, backend.device, choice.max_model_len)
        model: Model = target(checkpoint.config, ctx)
        left = [n for n in weights.unused() if not any(re.search(p, n) for p in model.ignored_weights)]
    except OutOfMemoryError as error:
        raise ConfigError(
            f"model.path={checkpoint.location}: the weights in {str(backend.dtype).removeprefix('torch.')} do not fit "
            f"into the memory of {backend.device} ({first_line(error)}). Free memory there, or use a smaller model"
        ) from error
    finally:
        weights.close()
    if left:
        raise CheckpointError(
            f"{checkpoint.location}: {len(left)} tensors are not used by model '{choice.model.name}', {left[0]} among "
            "them; the checkpoint is of another architecture than its config says"
        )
    _check_model(choice, model, ctx.layers)
    return Loaded(choice.config, checkpoint, choice.loader, choice.tokenizer, backend, model, ctx.layers, ctx.experts)


def _check_model(choice: Choice, model: Model, layers: list[LayerSpec]) -> None:
    """PluginError for a model that is not what was known of it before its weights were read."""
    name, wanted = choice.model.name, choice.checkpoint.config["vocab_size"]
    way_out = f"That is a fault of the plugin: `python -m framework check model/{name}` may say more"
    if model.vocab_size != wanted:
        raise PluginError(
            f"model={name} has vocab_size={model.vocab_size}, and config.json of {choice.checkpoint.location} says "
            f"{wanted}. {way_out}"
        )
    if layers != choice.layers:
        pairs = zip_longest(layers, choice.layers)
        found, known = next((found, known) for found, known in pairs if found != known)
        raise PluginError(
            f"model={name} declares other attention layers with its weights ({found or 'none'}) than without "
            f"({known or 'none'}). {way_out}"
        )


@dataclass(frozen=True)
class _KVMemory:
    """KV memory with the attention plugin bound to it, once a group.

    tensors          each holds a layer of every group, laid out as specs; a block has block_bytes in all of them
    num_swap_blocks  blocks of host memory for preempted requests, 0 when preemption recomputes
    """

    attention: Mapping[str, AttentionBackend]
    groups: tuple[KVGroup, ...]
    tensors: list[Any]
    specs: list[KVSpec]
    num_blocks: int
    num_swap_blocks: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in the pool at least: a group with a window keeps the last ones only."""
        return (self.num_blocks - 1) // len(self.groups) * self.groups[0].block_size


def _allocate(choice: Choice, layers: list[LayerSpec], attention: Mapping[str, AttentionBackend]) -> _KVMemory:
    groups = choice.groups
    members = [[layers[index] for index in group.layers] for group in groups]
    wanted = [[attention[g.name].kv_spec(layer) for layer in own] for g, own in zip(groups, members, strict=True)]
    specs = max(wanted, key=len)
    for group, asked in zip(groups, wanted, strict=True):
        if asked != specs[: len(asked)]:
            raise PluginError(
                f"attention={choice.attention.name} wants memory of {asked} for the layers of KV group '{group.name}', "
                f"and of {specs} for those of another one, whose heads are alike: groups share their memory. That is a "
                "fault of the plugin. Use another attention"
            )
    block_bytes = sum(spec.block_bytes for spec in specs)
    num_blocks = _num_blocks(choice, block_bytes, len(groups))
    tensors = _kv_tensors(choice, specs, num_blocks, block_bytes)
    for group, own in zip(groups, members, strict=True):
        attention[group.name].bind(own, tensors[: len(own)])
    num_swap_blocks = _num_swap_blocks(choice, num_blocks, block_bytes)
    return _KVMemory(attention, groups, tensors, specs, num_blocks, num_swap_blocks, block_bytes)


def _attention(choice: Choice) -> AttentionBackend:
    """One for a KV group: a plan knows one window, and one shape of heads."""
    config, backend = choice.config, choice.backend
    ctx = AttentionContext(
        backend=backend,
        block_size=choice.block_size,
        dtype=backend.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=choice.max_num_batched_tokens,
        max_model_len=choice.max_model_len,
        batch_invariant=config.engine.batch_invariant,
    )
    attention: AttentionBackend = choice.attention.target(choice.attention.options, ctx)
    return attention


def _kv_tensors(choice: Choice, specs: list[KVSpec], num_blocks: int, block_bytes: int) -> list[Any]:
    """The KV cache's memory. Nothing but allocation is tried here, so that whatever fails is about memory."""
    try:
        return choice.backend.allocate_kv(specs, num_blocks)
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"kv_cache.num_blocks={num_blocks} wants {num_blocks * block_bytes / 1e9:,.1f} GB, which the system does "
            f"not give ({first_line(error)}). Use fewer blocks, or free memory"
        ) from error


def _num_blocks(choice: Choice, block_bytes: int, num_groups: int) -> int:
    """Blocks of the pool, the null block included: as configured, else what the backend gives in memory. A token needs
    a place in a block of each group."""
    kv = choice.config.kv_cache
    if kv.num_blocks is not None:
        check_memory("kv_cache.num_blocks", kv.num_blocks, block_bytes, choice.backend, choice.max_model_len)
        return kv.num_blocks
    per_token = -(-block_bytes * num_groups // choice.block_size)
    available = choice.backend.kv_bytes_available(choice.max_model_len, per_token, kv.memory_fraction)
    blocks = available // block_bytes
    if blocks < 1 + num_groups:
        raise ConfigError(
            f"only {available} bytes are there for the KV cache, one block takes {block_bytes} and a request "
            f"{num_groups} at least; free memory, or set kv_cache.num_blocks or kv_cache.memory_fraction"
        )
    return int(blocks)


def _num_swap_blocks(choice: Choice, num_blocks: int, block_bytes: int) -> int:
    """Blocks of host memory for preempted requests, 0 when preemption recomputes."""
    if choice.config.scheduler.preemption != "swap":
        return 0
    asked = choice.config.kv_cache.num_swap_blocks
    if asked is None:
        return max(1, min(num_blocks - 1, _SWAP_BYTES // block_bytes))
    check_memory("kv_cache.num_swap_blocks", asked, block_bytes, choice.backend, choice.max_model_len)
    return asked


def _assemble(choice: Choice, loaded: Loaded, kv: _KVMemory, plugins: Registry, events: EventBus) -> Engine:
    from framework.worker.model_runner import ModelRunner

    choice.table.allocate(kv.groups)
    connector = connector_of(choice, plugins, kv.groups, kv.specs, kv.block_bytes)
    runner = ModelRunner(
        model=loaded.model,
        backend=choice.backend,
        attention=kv.attention,
        groups=kv.groups,
        kv=kv.tensors,
        kv_specs=kv.specs,
        table=choice.table,
        pipeline=choice.pipeline,
        max_num_batched_tokens=choice.max_num_batched_tokens,
        buckets=choice.buckets,
        num_swap_blocks=kv.num_swap_blocks,
        connector=connector,
    )
    choice.seconds.update(warm_up(runner))
    loaded.forget_counts()
    if choice.buckets and not runner.num_padded:
        _log.warning("attention=%s cannot be captured: every step is launched piece by piece", choice.attention.name)
    executor, max_in_flight = _executor(choice, runner)
    core = EngineCore(_scheduler(choice, kv, max_in_flight, connector), executor, events, max_in_flight)
    executor.start()
    return Engine(choice.config, core, choice.admission, choice.tokenizer, _facts(choice, kv), plugins, loaded)


def _executor(choice: Choice, runner: ModelRunner) -> tuple[Executor, int]:
    """The executor, and how many steps it is given at a time: scheduling ahead takes two of it at least."""
    executor: Executor = choice.executor.target(choice.executor.options, runner)
    if not async_scheduling(choice.config, choice.backend)[0]:
        return executor, 1
    if executor.max_in_flight < 2:
        executor = StepThread(executor)
    return executor, executor.max_in_flight


def _scheduler(choice: Choice, kv: _KVMemory, max_in_flight: int, connector: KVConnector) -> Scheduler:
    s = choice.config.scheduler
    ctx = SchedulerContext(
        groups=kv.groups,
        num_blocks=kv.num_blocks,
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=choice.max_num_batched_tokens,
        max_model_len=choice.max_model_len,
        chunked_prefill=s.chunked_prefill,
        prefix_caching=choice.config.kv_cache.prefix_caching,
        policy=choice.policy,
        connector=connector,
        max_in_flight=max_in_flight,
        num_swap_blocks=kv.num_swap_blocks,
    )
    scheduler: Scheduler = choice.scheduler.target(choice.scheduler.options, ctx)
    return scheduler


def _facts(choice: Choice, kv: _KVMemory) -> dict[str, Any]:
    """What was chosen and measured, for reports."""
    is_async, why_async = async_scheduling(choice.config, choice.backend)
    return {
        "backend": choice.backend.name,
        "attention": choice.attention.name,
        "model": choice.model.name,
        "model_label": getattr(choice.model.target, "label", None),
        "dtype": str(choice.backend.dtype).removeprefix("torch."),
        "max_model_len": choice.max_model_len,
        "max_num_batched_tokens": choice.max_num_batched_tokens,
        "block_size": choice.block_size,
        "num_blocks": kv.num_blocks,
        "kv_bytes": kv.num_blocks * kv.block_bytes,
        "kv_tokens": kv.num_tokens,
        "kv_groups": [_told(group) for group in kv.groups],
        "preemption": choice.config.scheduler.preemption,
        "num_swap_blocks": kv.num_swap_blocks,
        "kv_connector": choice.config.kv_connector.name,
        "async_scheduling": is_async,
        "why_async": why_async,
        "seconds": choice.seconds,
    }


def _told(group: KVGroup) -> dict[str, Any]:
    return {"name": group.name, "kind": group.kind, "window": group.window, "num_layers": len(group.layers)}


def _ready(facts: Mapping[str, Any]) -> str:
    """What was built, in one line."""
    size = facts["kv_bytes"] / 1e6
    least = "at least " if any(group["window"] is not None for group in facts["kv_groups"]) else ""
    model = f"{facts['model']} ({facts['model_label']})" if facts["model_label"] else facts["model"]
    return (
        f"{model} in {facts['dtype']} on {facts['backend']}, attention {facts['attention']}; KV cache of "
        f"{least}{facts['kv_tokens']} tokens ({size:.0f} MB at most); ready in {facts['seconds']['total']:.1f} s"
    )
