"""Which model plugin serves a checkpoint, and what of the configuration it keeps.

A plugin names the architectures that it serves; one that names `ANY` serves every one, and is taken only when the
configuration names it. Called while parts are chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from framework.errors import CheckpointError, ConfigError, PluginError, code_is_never_run
from framework.plugins import ANY

if TYPE_CHECKING:
    from framework.config import Config
    from framework.interfaces import Backend, Bucket, Checkpoint
    from framework.plugins import ComponentSpec, Registry


def model_spec(config: Config, checkpoint: Checkpoint, plugins: Registry) -> ComponentSpec:
    """The model plugin of the checkpoint's architecture; one that is named must serve it as well."""
    if not checkpoint.architectures:
        raise CheckpointError(
            f"{checkpoint.location}: config.json names no architectures, so no model can be chosen. Add the model's"
        )
    architecture = checkpoint.architectures[0]
    if config.model.name == "auto":
        return _provider(architecture, plugins, checkpoint)
    spec = plugins.spec("model", config.model.name)
    if architecture in spec.provides or ANY in spec.provides:
        return spec
    raise PluginError(
        f"model={spec.name} serves {', '.join(spec.provides) or 'nothing'}, but {checkpoint.location} is of "
        f"architecture {architecture}. Use model=auto"
    )


def _provider(architecture: str, plugins: Registry, checkpoint: Checkpoint) -> ComponentSpec:
    try:
        return plugins.provider("model", architecture)
    except PluginError as error:
        generic = [spec.name for spec in plugins.specs("model") if ANY in spec.provides]
        way_out = f" Slower, and for many more architectures: model={generic[0]}" if generic else ""
        raise PluginError(f"{error}{code_is_never_run(checkpoint.config)}{way_out}") from error


def check_model(name: str, target: Any, config: Config) -> None:
    """ConfigError for a model that does not keep what is asked for."""
    if config.engine.batch_invariant and not keeps(target, "batch_invariant"):
        raise ConfigError(f"engine.batch_invariant=true: model={name} does not offer it. Use a model plugin that does")


def buckets_of(target: Any, backend: Backend, max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Padded shapes that steps are compiled for: none of a model whose steps cannot be recorded."""
    return list(backend.buckets(max_num_seqs, max_num_batched_tokens)) if keeps(target, "graph_safe") else []


def keeps(target: Any, word: str) -> bool:
    """Whether a model keeps what `Capabilities` calls by this word: one that declares nothing keeps everything."""
    caps = getattr(target, "caps", None)
    return caps is None or word in caps.keeps
