"""Partial attention merges by log-sum-exp: any cut, any order, and pieces without a key weigh nothing."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from framework_attention.latent_products import Partial, attend, causal_mask, cut, merge_into

HEADS, QUERIES, DIM, VALUE, SCALE = 3, 5, 8, 6, 0.7


def inputs(num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_keys)
    shapes = ((HEADS, QUERIES, DIM), (HEADS, num_keys, DIM), (HEADS, num_keys, VALUE))
    q, keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return 3 * q, keys, values


def merged(parts: list[Partial], like: Tensor) -> Partial:
    sums = Partial.nothing(like, HEADS, QUERIES, VALUE)
    for part in parts:
        merge_into(sums, part)
    return sums


@pytest.mark.parametrize("sizes", [(13,), (1, 12), (5, 0, 8), (0, 13, 0), (4, 4, 5)], ids=str)
def test_pieces_in_any_order_give_the_whole(sizes: tuple[int, ...]) -> None:
    q, keys, values = inputs(13)
    weights = (q @ keys.transpose(1, 2) * SCALE).double()
    for order in permutations(range(len(sizes))):
        pieces = list(zip(keys.split(sizes, 1), values.split(sizes, 1), strict=True))
        sums = merged([attend(q, *pieces[i], SCALE) for i in order], q)
        torch.testing.assert_close(sums.out, weights.softmax(-1) @ values, atol=1e-12, rtol=0)
        torch.testing.assert_close(sums.lse, weights.logsumexp(-1), atol=1e-12, rtol=0)


def test_no_key_at_all_gives_zero_and_minus_infinity() -> None:
    q, keys, values = inputs(0)
    sums = merged([attend(q, keys, values, SCALE)] * 2, q)
    assert (sums.out == 0).all() and (sums.lse == -torch.inf).all()


def test_query_that_reads_no_key_of_a_piece_gets_nothing_of_it() -> None:
    q, keys, values = inputs(4)
    mask = causal_mask(QUERIES, 4, -2, torch.float64)  # the first two queries read nothing
    part = attend(q, keys, values, SCALE, mask)
    assert (part.out[:, :2] == 0).all() and (part.lse[:, :2] == -torch.inf).all()
    scores = q @ keys.transpose(1, 2) * SCALE + mask
    torch.testing.assert_close(part.out[:, 2:], scores[:, 2:].softmax(-1) @ values, atol=1e-12, rtol=0)
    before = attend(q, keys, values, SCALE)
    sums = merged([before, part], q)
    torch.testing.assert_close(sums.out[:, :2], before.out[:, :2], atol=1e-12, rtol=0)


def test_pieces_whose_scores_lie_far_apart_stay_finite() -> None:
    q, keys, values = inputs(6)
    far = merged([attend(q, keys, values, 1e4), attend(q, keys, values, -1e4)], q)
    assert far.out.isfinite().all() and far.lse.isfinite().all()


def test_cuts_cover_everything_once() -> None:
    assert cut(0, 4) == [] and cut(4, 4) == [(0, 4)] and cut(9, 4) == [(0, 4), (4, 8), (8, 9)]


def test_a_causal_mask_hides_what_lies_ahead() -> None:
    seen = (causal_mask(3, 4, 1, torch.float32) == 0).tolist()
    assert seen == [[True, True, False, False], [True, True, True, False], [True, True, True, True]]
