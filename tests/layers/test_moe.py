"""The sparse block hands its router to a backend that widens rows, and widens them itself for one that does not."""

import torch
from torch.nn import functional

from framework.layers.moe import widening

WEIGHT = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Plain:
    """A product that takes rows of its weight's dtype."""

    def __call__(self, x):
        return functional.linear(x, WEIGHT)


class Widening(Plain):
    """A product that takes rows of 16 bits as well, and turns its sign to be told apart."""

    def widened(self, x):
        return -functional.linear(x.float(), WEIGHT)


def test_rows_of_16_bits_are_widened_for_a_product_that_takes_none():
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(widening(Plain())(x), functional.linear(x.float(), WEIGHT))


def test_rows_of_16_bits_go_as_they_are_to_a_product_that_widens_them():
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(widening(Widening())(x), -functional.linear(x.float(), WEIGHT))
