"""What was chosen automatically for an engine, and why: read off the parts before weights load, and off a built engine.

Decides nothing. `run=explain` prints it; what a component decides by itself it tells through `interfaces.Explains`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.engine.attending import unfit
from framework.engine.choice import async_scheduling
from framework.interfaces import Explains

if TYPE_CHECKING:
    from framework.engine.choice import Choice
    from framework.engine.engine import Engine
    from framework.plugins import ComponentSpec, Registry


@dataclass(frozen=True)
class Reason:
    """value: None while it is not known."""

    key: str
    value: Any
    why: str


def automatic(choice: Choice, plugins: Registry) -> list[Reason]:
    """What the configuration left open and what was taken, in the order of the build."""
    return [*_parts(choice, plugins), *_sizes(choice), *_of_components(choice), *_defaults(choice)]


def _parts(choice: Choice, plugins: Registry) -> Iterator[Reason]:
    config, checkpoint = choice.config, choice.checkpoint
    if config.backend.name == "auto":
        yield Reason("backend", choice.backend.name, _among(plugins, "backend", choice.backend.name))
    if config.attention.name == "auto":
        device = choice.backend.device.type
        why = _among(plugins, "attention", choice.attention.name, device, unfit(plugins, choice.layers))
        yield Reason("attention", choice.attention.name, why)
    if config.engine.load_format == "auto":
        yield Reason("engine.load_format", checkpoint.format, f"what lies at {checkpoint.location}")
    grammar = choice.admission.grammars.name
    if config.grammar.name == "auto" and grammar != "none":
        yield Reason("grammar", grammar, _among(plugins, "grammar", grammar))
    if config.model.name == "auto":
        yield Reason("model", choice.model.name, f"serves architecture {checkpoint.architectures[0]} of the checkpoint")
    label = getattr(choice.model.target, "label", None)
    if label is not None:
        yield Reason("model", choice.model.name, label)


def _among(
    plugins: Registry,
    kind: str,
    name: str,
    device: str | None = None,
    unfit: Callable[[ComponentSpec], str | None] = lambda spec: None,
) -> str:
    """Why `name` was taken of the components of a kind, and why the others were not; unfit: of usable ones."""
    others = [spec.name for spec in plugins.specs(kind) if spec.name != name]
    reasons = {
        other: plugins.misfit(kind, other, device) or plugins.usable(kind, other) or unfit(plugins.spec(kind, other))
        for other in others
    }
    unusable = [f"{other}: {reason}" for other, reason in reasons.items() if reason]
    usable = [other for other, reason in reasons.items() if not reason]
    chosen = plugins.spec(kind, name)
    if not usable:
        why = "the only one that can be used here"
    elif any(plugins.spec(kind, other).priority > chosen.priority for other in usable):
        why = f"a plugin's hook chose it; usable too: {', '.join(usable)}"
    else:
        why = f"the highest priority ({chosen.priority}); usable too: {', '.join(usable)}"
    return f"{why}; not usable: {'; '.join(unusable)}" if unusable else why


def _sizes(choice: Choice) -> Iterator[Reason]:
    config = choice.config
    if config.engine.max_model_len is None:
        yield Reason("engine.max_model_len", choice.max_model_len, "max_position_embeddings of the checkpoint")
    if config.scheduler.max_num_batched_tokens is None:
        why = f"the default of backend={choice.backend.name}"
        yield Reason("scheduler.max_num_batched_tokens", choice.max_num_batched_tokens, why)
    if config.kv_cache.block_size is None:
        yield Reason("kv_cache.block_size", choice.block_size, f"the first choice of attention={choice.attention.name}")
    if config.engine.async_scheduling is None:
        yield Reason("engine.async_scheduling", *async_scheduling(config, choice.backend))
    if config.scheduler.preemption == "swap" and config.kv_cache.num_swap_blocks is None:
        yield Reason("kv_cache.num_swap_blocks", None, f"as many as the pool, at most 4 GiB; {_WHEN_FULL}")


def _of_components(choice: Choice) -> Iterator[Reason]:
    """What components say of themselves; keys that the configuration has set are no choice of theirs."""
    config = choice.config
    is_set = {
        "engine.dtype": config.engine.dtype != "auto",
        "kv_cache.num_blocks": config.kv_cache.num_blocks is not None,
    }
    if isinstance(choice.backend, Explains):
        for key, (value, why) in choice.backend.explain().items():
            if not is_set.get(key, False):
                yield Reason(key, value, why)


def _defaults(choice: Choice) -> Iterator[Reason]:
    """Sampling defaults that come from the checkpoint, and the ids that end a request."""
    defaults = choice.admission.defaults
    for name, value in defaults.unlike_defaults().items():
        if name not in choice.config.sampler.params:
            yield Reason(f"sampler.{name}", value, "generation_config.json of the checkpoint")
    if "max_tokens" not in choice.config.sampler.params:
        yield Reason("sampler.max_tokens", defaults.max_tokens, "SamplingParams; in run=chat, as many as fit")
    yield Reason(
        "eos token ids",
        sorted(choice.admission.limits.eos_token_ids),
        "generation_config.json and config.json of the checkpoint, else its tokenizer",
    )


_WHEN_FULL = "a preempted request that finds no room there is computed again"

WHEN_BUILT = ("kv_cache.num_blocks", "KV groups", "KV cache bytes", "start-up seconds")
"""What `once_built` tells, for a report without an engine."""


def once_built(engine: Engine) -> list[Reason]:
    """What only a built engine knows."""
    facts = engine.facts
    seconds = ", ".join(f"{part} {value:.2f}" for part, value in facts["seconds"].items() if part != "total")
    swap = [Reason("kv_cache.num_swap_blocks", facts["num_swap_blocks"], f"blocks of host memory; {_WHEN_FULL}")]
    return [
        Reason("kv_cache.num_blocks", facts["num_blocks"], f"{facts['kv_tokens']} tokens beside the null block"),
        Reason("KV groups", len(facts["kv_groups"]), "; ".join(map(_group, facts["kv_groups"]))),
        *(swap if facts["num_swap_blocks"] else ()),
        Reason("KV cache bytes", facts["kv_bytes"], "in all layers, at most: a block takes memory when it is written"),
        Reason("start-up seconds", round(facts["seconds"]["total"], 2), seconds),
    ]


def _group(group: Mapping[str, Any]) -> str:
    window = "" if group["window"] is None else f" of window {group['window']}"
    count = group["num_layers"]
    return f"{group['name']}: {count} layer{'s' * (count != 1)}, {group['kind']}{window}"
