"""How a model's attention layers share KV memory: groups of layers with one block list a request, of one size each.

Groups take their blocks out of one pool, so a block must hold as many bytes in each of them: the layers of a group lie
in tensors, one a layer, and every group uses the same tensors. Called once an engine, before weights load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from framework.errors import ConfigError
from framework.interfaces import KVGroup

if TYPE_CHECKING:
    from framework.interfaces import LayerSpec

_NEARLY_ALIKE = 1.5
"""Groups that differ by no more than this factor are left whole: what the smaller one wastes is worth a block list."""
MAX_GROUPS = 8
"""What splitting makes at most: a group costs a block table, metadata, a plan of attention and a lookup of prefixes in
every step, whatever its layers. Published models stay below by parts as large as their smallest group (Gemma 3: 7)."""


def kv_groups(layers: Sequence[LayerSpec], block_size: int) -> tuple[KVGroup, ...]:
    """KV groups in the order in which the layers name them, those of a split one side by side (`sliding.0`, ...).

    A group with many more layers than another is split, so that all fill about as many tensors (`group_size`).
    Raises ConfigError for layers of one declared group that differ in kind or window, and for layers that are to share
    a tensor and have other heads.
    """
    declared: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        declared.setdefault(layer.group, []).append(layer)
    size = group_size([len(members) for members in declared.values()])
    groups: list[KVGroup] = []
    for name, members in declared.items():
        _check_alike(name, members)
        groups += _split(name, members, size, block_size)
    _check_heads(groups, layers)
    return tuple(groups)


def group_size(counts: Sequence[int]) -> int:
    """The most layers that a group has, of groups that were declared with `counts` layers.

    The largest, where it is within a factor of 1.5 of the smallest. Else as many as the smallest has, as in vLLM: in
    most models that is the group without windows, whose blocks last as long as their request, and so have no place
    empty. Where that makes more than MAX_GROUPS groups, the size that leaves the fewest places empty without doing so:
    27 layers and 1 become 8 groups of 4 places, of which 4 in 32 are empty, instead of 28 groups. More than MAX_GROUPS
    that were declared stay as they are.
    """
    least, most = min(counts), max(counts)
    if most <= _NEARLY_ALIKE * least:
        return most
    if _num_groups(counts, least) <= MAX_GROUPS:
        return least
    fitting = [size for size in range(least, most) if _num_groups(counts, size) <= MAX_GROUPS]
    return min((*fitting, most), key=lambda size: (_num_places(counts, size), _num_groups(counts, size)))


def _num_groups(counts: Sequence[int], size: int) -> int:
    return sum(-(-count // size) for count in counts)


def _num_places(counts: Sequence[int], size: int) -> int:
    """Layers that would fit into groups of the largest part's size."""
    largest = max(-(-count // -(-count // size)) for count in counts)
    return _num_groups(counts, size) * largest


def _check_alike(name: str, members: Sequence[LayerSpec]) -> None:
    first = members[0]
    for layer in members[1:]:
        if (layer.kind, layer.window) != (first.kind, first.window):
            raise ConfigError(
                f"KV group '{name}': layer {first.index} is {_told(first)} and layer {layer.index} is {_told(layer)}. "
                "Layers of one group share kind and window: give each a group of its own"
            )


def _told(layer: LayerSpec) -> str:
    return layer.kind if layer.window is None else f"{layer.kind} of window {layer.window}"


def _split(name: str, members: Sequence[LayerSpec], size: int, block_size: int) -> list[KVGroup]:
    """Neighbours stand in different parts, so that the parts differ by a layer at most."""
    count = -(-len(members) // size)
    names = [name] if count == 1 else [f"{name}.{part}" for part in range(count)]
    first = members[0]
    return [
        KVGroup(part_name, first.kind, block_size, first.window, tuple(x.index for x in members[part::count]))
        for part, part_name in enumerate(names)
    ]


def num_tensors(groups: Sequence[KVGroup]) -> int:
    """KV tensors that the groups need: the n-th layer of every group lies in the n-th."""
    return max(len(group.layers) for group in groups)


def _check_heads(groups: Sequence[KVGroup], layers: Sequence[LayerSpec]) -> None:
    for place in range(num_tensors(groups)):
        first, *others = [layers[g.layers[place]] for g in groups if place < len(g.layers)]
        for other in others:
            if _heads(other) != _heads(first):
                raise ConfigError(
                    f"layers {first.index} and {other.index} lie in the same KV memory, as layers of KV groups do, but "
                    f"have {first.num_kv_heads} KV heads of {first.head_dim} and {other.num_kv_heads} of "
                    f"{other.head_dim}: groups whose heads differ are not built yet. Use another model"
                )


def _heads(layer: LayerSpec) -> tuple[int, int, int | None]:
    return layer.num_kv_heads, layer.head_dim, layer.value_dim
