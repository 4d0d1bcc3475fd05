"""The order of dimensions inside a head in which kernels rotate: pairs that stand half a head apart.

A checkpoint that pairs neighbours, or rotates some of a head only, is read into that order: rows of the query and key
products (and norms of heads) are permuted alike, which changes no dot product. Called by layers while weights load.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def half_split_order(head_dim: int, rotary_dim: int | None = None, *, neighbours: bool = False) -> list[int]:
    """[head_dim] the checkpoint's dimension of each of ours: rotated pair i stands at i and i + head_dim / 2.

    rotary_dim  how many dimensions, the first, are rotated (None: all). The others follow the rotated ones of either
                half, where a table of cosine 1 and sine 0 leaves them as they are
    neighbours  whether the checkpoint's pair i is (2 i, 2 i + 1), as in RoFormer (arXiv 2104.09864), section 3.4.2;
                else it is (i, i + rotary_dim / 2)
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    assert head_dim % 2 == 0 and rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim, (head_dim, rotary_dim)
    rotated, passed = list(range(rotary_dim)), list(range(rotary_dim, head_dim))
    if neighbours:
        rotated = rotated[::2] + rotated[1::2]
    return [*_first_half(rotated), *_first_half(passed), *_second_half(rotated), *_second_half(passed)]


def _first_half(dims: list[int]) -> list[int]:
    return dims[: len(dims) // 2]


def _second_half(dims: list[int]) -> list[int]:
    return dims[len(dims) // 2 :]


def reorder_heads(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Rows [num_heads * len(order), ...] with those of each head in `order`; the tensor itself where that is theirs."""
    if list(order) == list(range(len(order))):
        return tensor
    heads = tensor.unflatten(0, (-1, len(order)))
    return heads.index_select(1, torch.tensor(order, device=tensor.device)).flatten(0, 1)
