"""What `mla_triton` says that a step takes beside its result, against what it takes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from framework.interfaces import TakesWorkspace
from framework.testing.attention import DEEPSEEK, AttentionCase, LatentSizes, build

from .latent_steps import LatentStep

SMALL = LatentSizes(24, 16, 32, 20)
CHUNKS = AttentionCase("chunks", (12, 0), (30, 1), num_heads=2, latent=SMALL)
PROMPT = AttentionCase("prompt", (3, 20), (70, 1), num_heads=2, latent=SMALL)
LONG = AttentionCase("long", (9000, 700, 0), (600, 1, 300), num_heads=16, latent=DEEPSEEK)


class Taken(TorchDispatchMode):
    """Counts the bytes of new tensors of a dtype, of results of products and of tensors without values."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.num_bytes = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.mm) and out.dtype is self.dtype:
            self.num_bytes += out.nbytes
        return out


def announced(one, out):
    """By an attention that knows no more than as many rows as the case has."""
    assert isinstance(one.attention, TakesWorkspace)
    return one.attention.workspace_bytes(one.built.case.layer(None), one.built.q, out)


@pytest.mark.parametrize("case", (CHUNKS, PROMPT), ids=lambda case: case.name)
@pytest.mark.parametrize("is_invariant", (False, True), ids=("fast", "invariant"))
def test_a_step_takes_no_more_than_is_announced(device, case, is_invariant):
    one = LatentStep(build(case, 16, torch.float16), device, 16, is_invariant=is_invariant)
    plan, q, latent = one.plan(), one.built.q.to(device), one.built.k[:, 0].to(device)
    with Taken(torch.float16) as taken:
        out = plan.forward_latent(0, q, latent, one.up)
    assert 0 < taken.num_bytes - out.nbytes <= announced(one, out)


def test_pieces_bound_what_long_prompts_take(device, monkeypatch):
    from framework_attention.triton import latent

    one = LatentStep(build(PROMPT, 16, torch.float16), device, 16)
    out = one.built.q.new_empty(71, 2, 20)
    before = announced(one, out)
    monkeypatch.setattr(latent, "_EXPANDED_VALUES", 1)
    assert announced(one, out) < before


@pytest.mark.cuda
@pytest.mark.parametrize("is_invariant", (False, True), ids=("fast", "invariant"))
def test_the_peak_of_a_step_is_no_more_than_is_announced_on_a_device(device, is_invariant):
    one = LatentStep(build(LONG, 64, torch.bfloat16), device, 64, is_invariant=is_invariant)
    plan, q, latent = one.plan(), one.built.q.to(device), one.built.k[:, 0].to(device)
    plan.forward_latent(0, q, latent, one.up)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = plan.forward_latent(0, q, latent, one.up)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before - out.nbytes
    # torch counts in pieces of 512 bytes, and cuBLAS may take its own workspace with the first product
    assert 0 < taken <= announced(one, out) + (1 << 20)
