"""The engine's KV connector: built with all that tells one engine's KV from another's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.engine.guarded_connector import GuardedConnector
from framework.errors import ConfigError, PluginError
from framework.interfaces import ConnectorContext
from framework.nulls import NoConnector

if TYPE_CHECKING:
    from framework.engine.choice import Choice, Part
    from framework.interfaces import Checkpoint, KVConnector, KVGroup, KVSpec, LayerSpec
    from framework.plugins import Registry


def connector_of(
    choice: Choice, plugins: Registry, groups: Sequence[KVGroup], specs: Sequence[KVSpec], block_bytes: int
) -> KVConnector:
    """The connector of `choice`, guarded, or the null one. PluginError for one that is not what its class says."""
    part = choice.connector
    if part is None:
        return NoConnector()
    ctx = ConnectorContext(kv_identity(choice, specs), choice.block_size, len(groups), block_bytes)
    label = plugins.label(plugins.spec("kv_connector", part.name))
    connector, said = part.target(part.options, ctx), is_layerwise(part.name, part.target, part.options)
    if bool(connector.layerwise) != said:
        connector.close()
        raise PluginError(
            f"kv_connector={part.name}: its class says layerwise={said}, and once it is built it is the contrary. That "
            "is a fault of the plugin: the class must say it"
        )
    return GuardedConnector(connector, label, choice.block_size)


def check_connector(connector: Part | None, model: str, layers: Sequence[LayerSpec], groups: Sequence[KVGroup]) -> None:
    """ConfigError for a connector beside a model whose layers forget what lies behind a window: what a request still
    needs of a prefix differs from group to group then, and a connector is asked for whole columns. And for one that
    moves KV layer by layer beside several KV groups."""
    if connector is None:
        return
    windows = sorted({layer.window for layer in layers if layer.window is not None})
    if windows:
        raise ConfigError(
            f"kv_connector={connector.name} moves blocks of every layer, and model={model} has layers of window "
            f"{', '.join(map(str, windows))}, whose blocks are given up behind it: the two are not built to go "
            "together yet. Use kv_connector=none"
        )
    if is_layerwise(connector.name, connector.target, connector.options) and len(groups) > 1:
        raise ConfigError(
            f"kv_connector={connector.name} moves KV layer by layer, and model={model} has {len(groups)} KV groups, "
            "whose layers share memory: that is not built yet. Use kv_connector=none"
        )


def is_layerwise(name: str, target: Any, options: Any) -> bool:
    """Whether a connector wants to be asked around each layer: what its class says, or answers to its options.
    PluginError for one that says nothing."""
    ask = getattr(target, "is_layerwise", None)
    said = getattr(target, "layerwise", None) if ask is None else ask(options)
    if not isinstance(said, bool):
        raise PluginError(
            f"kv_connector={name}: its class does not say whether it is layerwise (layerwise={said!r}), which is asked "
            "before weights load. Write layerwise = False, or True, in the class"
        )
    return said


def kv_identity(choice: Choice, specs: Sequence[KVSpec]) -> bytes:
    """Digest of all that changes the bytes of KV beside a request's own tokens, adapter, salt and images.

    Weights stand for themselves by file name, size and time of change; generated ones by their seed.
    """
    from framework.layers.rope import depends_on_length

    checkpoint, engine = choice.checkpoint, choice.config.engine
    seed = engine.seed or 0 if checkpoint.format == "dummy" else None
    parts = [
        *_weights(checkpoint), json.dumps(checkpoint.config, sort_keys=True, default=str), seed, choice.model.name,
        choice.backend.name, choice.backend.dtype, engine.batch_invariant, choice.attention.name, choice.block_size,
        choice.max_model_len if depends_on_length(checkpoint.config) else None,
        *((spec.shape, spec.dtype) for spec in specs),
    ]  # fmt: skip
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _weights(checkpoint: Checkpoint) -> Iterator[tuple[str, int, int]]:
    location = Path(checkpoint.location).resolve()
    for path in sorted(location.iterdir()) if location.is_dir() else [location]:
        if path.is_file():
            yield str(path), path.stat().st_size, path.stat().st_mtime_ns
