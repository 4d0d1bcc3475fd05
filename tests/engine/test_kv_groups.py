"""Layers are put into groups of like size that share tensors, and what cannot share is refused by name."""

from __future__ import annotations

import pytest

from framework.engine.kv_groups import MAX_GROUPS, group_size, kv_groups, num_tensors
from framework.errors import ConfigError
from framework.interfaces import LayerSpec


def layers(*windows, **fields):
    """A layer for each window, in a group named after it."""
    return [layer(i, f"w{w}" if w else "full", window=w, **fields) for i, w in enumerate(windows)]


def layer(index, group, **fields):
    return LayerSpec(index, group, 4, 2, 16, 0.25, **fields)


def members(groups):
    return {group.name: group.layers for group in groups}


def test_one_declared_group_is_one_group():
    (group,) = kv_groups(layers(None, None, None), 16)
    assert (group.name, group.kind, group.window, group.layers, group.block_size) == (
        "full",
        "full",
        None,
        (0, 1, 2),
        16,
    )


def test_groups_stand_in_the_order_in_which_layers_name_them():
    groups = kv_groups(layers(8, None, 8, None), 16)
    assert members(groups) == {"w8": (0, 2), "full": (1, 3)}
    assert [(g.kind, g.window) for g in groups] == [("sliding", 8), ("full", None)]


def test_latent_layers_are_a_group_of_their_kind():
    (group,) = kv_groups([layer(0, "latent", value_dim=8)], 16)
    assert group.kind == "latent"


def test_five_sliding_layers_to_a_full_one_become_five_groups_of_neighbours():
    groups = kv_groups(layers(*[8, 8, 8, 8, 8, None] * 2), 16)
    assert members(groups) == {
        "w8.0": (0, 6), "w8.1": (1, 7), "w8.2": (2, 8), "w8.3": (3, 9), "w8.4": (4, 10), "full": (5, 11),
    }  # fmt: skip
    assert num_tensors(groups) == 2


def test_parts_of_a_split_group_differ_by_a_layer_at_most():
    groups = kv_groups(layers(*[8] * 22, *[None] * 4), 16)  # as many as Gemma 3 1B has
    sizes = [len(group.layers) for group in groups]
    assert sizes == [4, 4, 4, 4, 3, 3, 4] and num_tensors(groups) == 4


@pytest.mark.parametrize(
    "counts, size", [([7], 7), ([4, 4], 4), ([4, 6], 6), ([4, 7], 4), ([1, 5], 1), ([12, 10, 9], 12), ([2, 5, 8], 2)]
)
def test_size_is_the_smallest_unless_the_largest_is_within_half_of_it(counts, size):
    assert group_size(counts) == size


def split(counts):
    """(groups, places, empty places) of layers that were declared in groups of these sizes."""
    declared = [window for window, count in enumerate(counts, 1) for _ in range(count)]
    groups = kv_groups(layers(*declared), 16)
    assert sorted(index for group in groups for index in group.layers) == list(range(sum(counts)))
    places = len(groups) * num_tensors(groups)
    return len(groups), places, places - sum(counts)


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        # as published: (sliding, full) of Gemma 2 9B, of Gemma 3 270M, 1B, 4B, 12B and 27B, of gpt-oss 120B
        ((21, 21), (2, 42, 0)), ((15, 3), (6, 18, 0)), ((22, 4), (7, 28, 2)), ((29, 5), (7, 35, 1)),
        ((40, 8), (6, 48, 0)), ((52, 10), (7, 70, 8)), ((18, 18), (2, 36, 0)),
        # what would be more than 8
        ((27, 1), (8, 32, 4)), ((1, 27), (8, 32, 4)), ((8, 1), (5, 10, 1)), ((15, 2), (6, 18, 1)),
        ((31, 1), (5, 40, 8)), ((63, 1), (8, 72, 8)), ((2, 9, 40), (6, 60, 9)),
        ((1, 1, 1, 1, 1, 1, 1, 20), (8, 160, 133)), ((1, 1, 1, 1, 1, 1, 1, 1, 2), (9, 18, 8)),
    ],
)  # fmt: skip
def test_groups_and_the_places_that_they_leave_empty(counts, found):
    assert split(counts) == found


def test_no_split_makes_more_groups_than_the_bound_nor_leaves_more_empty_than_another_that_keeps_to_it():
    for first in range(1, 41):
        for second in range(1, 41):
            num_groups, places, _ = split((first, second))
            assert num_groups <= MAX_GROUPS
            least = min(first, second)
            if first + second > MAX_GROUPS * least:  # as many as the smallest are too many groups
                others = [parts(first, size) + parts(second, size) for size in range(1, max(first, second) + 1)]
                assert places == min(len(sizes) * max(sizes) for sizes in others if len(sizes) <= MAX_GROUPS)


def parts(count, size):
    """Layers of each part when none has more than size: as alike as they can be."""
    number = -(-count // size)
    return [len(range(part, count, number)) for part in range(number)]


def test_layers_of_one_group_with_different_windows_are_refused():
    mixed = [layer(0, "a", window=8), layer(1, "a", window=16)]
    with pytest.raises(
        ConfigError, match="KV group 'a': layer 0 is sliding of window 8 and layer 1 is sliding of window"
    ):
        kv_groups(mixed, 16)


def test_layers_of_one_group_of_different_kinds_are_refused():
    with pytest.raises(
        ConfigError, match=r"KV group 'a': layer 0 is full and layer 1 is latent. .* a group of its own"
    ):
        kv_groups([layer(0, "a"), layer(1, "a", value_dim=8)], 16)


def test_layers_that_share_a_tensor_and_have_other_heads_are_refused():
    others = [layer(0, "w8", window=8), LayerSpec(1, "full", 4, 1, 32, 0.25)]
    with pytest.raises(
        ConfigError, match=r"layers 0 and 1 lie in the same KV .* 2 KV heads of 16 and 1 of 32: .* not bu"
    ):
        kv_groups(others, 16)


def test_layers_of_one_group_may_have_other_heads_than_each_other():
    """Each lies in a tensor of its own."""
    (group,) = kv_groups([layer(0, "full"), LayerSpec(1, "full", 4, 1, 32, 0.25)], 16)
    assert group.layers == (0, 1)


def test_places_that_only_one_group_fills_are_free_in_their_heads():
    found = kv_groups([*layers(8, 8, None, None), LayerSpec(4, "full", 4, 1, 32, 0.25)], 16)
    assert members(found) == {"w8": (0, 1), "full": (2, 3, 4)}
