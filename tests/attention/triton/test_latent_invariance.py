"""`batch_invariant` of latent attention: a query's bits depend on its request alone."""

import pytest
import torch

from framework.testing.attention import DEEPSEEK, AttentionCase, LatentSizes, build

from .latent_steps import LatentStep
from .test_triton_invariance import part

SMALL = LatentSizes(16, 16, 32, 16)


@pytest.mark.parametrize("dtype", (torch.float16, pytest.param(torch.float32, marks=pytest.mark.full)), ids=str)
def test_bits_depend_neither_on_chunks_nor_on_neighbours(device, dtype):
    built = build(AttentionCase("whole", (0,), (25,), num_heads=1, latent=SMALL), 16, dtype)
    whole = LatentStep(built, device, 16, is_invariant=True).forward()
    for computed, end, neighbours in [(24, 25, ()), (13, 25, ()), (14, 15, ((0, 5), (33, 1)))]:
        other = part(built, computed, end, neighbours)
        other.up = built.up
        out = LatentStep(other, device, 16, is_invariant=True).forward()
        assert torch.equal(out[computed - end :], whole[computed:end]), f"{computed} to {end} beside {neighbours}"


@pytest.mark.cuda
@pytest.mark.parametrize("num_heads", (16, 128, 6))
def test_bits_of_long_requests_depend_on_nothing_else_on_a_device(device, num_heads):
    built = build(AttentionCase("long", (0,), (700,), num_heads=num_heads, latent=DEEPSEEK), 16, torch.bfloat16)
    whole = LatentStep(built, device, 16, is_invariant=True).forward()
    for computed, end, neighbours in [(699, 700, ()), (300, 700, ()), (600, 601, ((0, 400), (33, 1), (1200, 1)))]:
        other = part(built, computed, end, neighbours)
        other.up = built.up
        out = LatentStep(other, device, 16, is_invariant=True).forward()
        assert torch.equal(out[computed - end :], whole[computed:end])
