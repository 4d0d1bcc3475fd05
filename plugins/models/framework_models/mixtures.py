"""What a config.json says of mixtures of experts, read and checked once: how many, how wide, in which layers, and how a
token gets its own. Used by the families whose feed-forward blocks are sparse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import CheckpointError
from framework.interfaces import Routing
from framework_models.dense import read_size


@dataclass(frozen=True)
class Mixture:
    """num_experts of inner size `width`, in the layers that are not among the `dense` ones."""

    num_experts: int
    width: int
    routing: Routing
    dense: Collection[int] = ()


def read_mixture(
    config: Mapping[str, Any],
    *,
    count: tuple[str, ...],
    width: str,
    k: tuple[str, ...] = ("num_experts_per_tok",),
    **routing: Any,
) -> Mixture:
    """The Mixture of a config.json whose keys for the number of experts, their inner size and how many a token gets are
    `count`, `width` and `k`, the first that is there; routing: the rest of `Routing`. Raises CheckpointError naming a
    key that is missing or does not fit."""
    num_experts, chosen = _first(config, count), _first(config, k)
    if chosen > num_experts:
        raise CheckpointError(
            f"config.json: {k[0]}={chosen}, but there are {num_experts} experts ({count[0]}). Correct it."
        )
    return Mixture(num_experts, read_size(config, width), Routing(chosen, **routing), read_dense_layers(config))


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return read_size(config, next((key for key in keys if config.get(key) is not None), keys[0]))


def read_dense_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th one."""
    num_layers, step = read_size(config, "num_hidden_layers"), read_size(config, "decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        raise CheckpointError(
            f"config.json: mlp_only_layers must list layers below num_hidden_layers={num_layers}, got {listed!r}."
        )
    return frozenset(listed) | {layer for layer in range(num_layers) if (layer + 1) % step}
