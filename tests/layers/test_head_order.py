"""Permuted heads are rotated by half-split kernels as the checkpoint's own order is by its own pairing."""

import pytest
import torch

from framework.layers import ops
from framework.layers.head_order import half_split_order, reorder_heads


def turned_pairs(x, pairs, angles):
    """x [T, D] with each pair of dimensions turned by its angle [T, pairs]: the definition."""
    out = x.clone()
    for i, (a, b) in enumerate(pairs):
        cos, sin = angles[:, i].cos(), angles[:, i].sin()
        out[:, a], out[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
    return out


@pytest.mark.parametrize(("dim", "rotary"), [(8, 8), (8, 4), (10, 4), (12, 2)])
@pytest.mark.parametrize("neighbours", [False, True])
def test_rotated_pairs_stand_half_a_head_apart_and_the_rest_passes(dim, rotary, neighbours):
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    half = torch.randn(5, rotary // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = [(2 * i, 2 * i + 1) if neighbours else (i, i + rotary // 2) for i in range(rotary // 2)]
    order = half_split_order(dim, rotary, neighbours=neighbours)
    angles = torch.nn.functional.pad(half, (0, (dim - rotary) // 2))[:, None]
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()
    found = ops.rotate(x[:, None, order].float(), cos.float(), sin.float())[:, 0]
    # the rotation counts in float32
    torch.testing.assert_close(found.double(), turned_pairs(x, pairs, half)[:, order], atol=1e-6, rtol=1e-6)


def test_order_is_a_permutation_and_plain_heads_stay_as_they_are():
    assert sorted(half_split_order(12, 4, neighbours=True)) == list(range(12))
    weight = torch.randn(24, 3)
    assert half_split_order(8) == list(range(8)) and reorder_heads(weight, half_split_order(8)) is weight


def test_rows_of_each_head_are_reordered_alike():
    weight, order = torch.arange(8.0)[:, None].expand(8, 2), half_split_order(4, neighbours=True)
    assert reorder_heads(weight, order)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert reorder_heads(weight[:, 0], order).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
