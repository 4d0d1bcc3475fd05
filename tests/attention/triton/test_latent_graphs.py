"""Captured steps of latent decodes: recorded once, and replays serve other lengths, rows and blocks."""

from dataclasses import replace

import pytest
import torch

from framework.interfaces import LatentNorm, Rotation
from framework.testing.attention import DEEPSEEK, AttentionCase, build

from .latent_steps import LatentStep

LENS = ((40, 3, 700, 1), (1, 1500, 64, 300), (0, 17, 0, 128))


def case_of(lens):
    computed = tuple(max(n - 1, 0) for n in lens)
    return AttentionCase("lens", computed, (1,) * 4, num_heads=16, latent=DEEPSEEK)


def inputs(lens, seed):
    """A step of four rows, those of length 0 padding."""
    built = build(case_of(lens), 64, torch.bfloat16, seed)
    for row, length in enumerate(lens):
        if length == 0:
            built.batch.seq_lens[row] = 0
            built.batch.idx_mapping[row] = 0
            built.batch.slot_mapping[0][row] = row
    return built


@pytest.mark.cuda
@pytest.mark.parametrize("is_invariant", (False, True), ids=("fast", "invariant"))
@pytest.mark.parametrize("has_projections", (False, True), ids=("forward", "projections"))
def test_replays_of_one_capture_equal_eager_steps(device, is_invariant, has_projections):
    widest = build(case_of((1500,) * 4), 64, torch.bfloat16)
    one = LatentStep(widest, device, 64, is_invariant=is_invariant)
    one.kv.normal_()
    batch = one.batch()
    columns = batch.block_table[0].shape[1]
    batch = replace(batch, seq_lens_max_np=widest.batch.seq_lens_max_np * 0 + 4096)
    q, latent = widest.q.to(device), widest.k[:, 0].to(device)
    rotation = Rotation(torch.randn(4096, 2, 64, device=device), batch.positions)
    norm = LatentNorm(torch.rand(512, device=device).to(torch.bfloat16), 1e-6)

    def run():
        plan = one.attention.plan(batch, 0)
        if has_projections:
            return plan.forward_latent_projections(0, q, latent, rotation, norm, one.up)
        return plan.forward_latent(0, q, latent, one.up)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, lens in enumerate(LENS):
        built = inputs(lens, seed)
        kv = one.kv.clone()
        results = []
        for replayed in (True, False):
            one.kv.copy_(kv)
            q.copy_(built.q)
            latent.copy_(built.k[:, 0])
            batch.block_table[0].copy_(torch.nn.functional.pad(built.batch.block_table[0], (0, columns))[:, :columns])
            batch.slot_mapping[0].copy_(built.batch.slot_mapping[0])
            batch.seq_lens.copy_(built.batch.seq_lens)
            batch.idx_mapping.copy_(built.batch.idx_mapping)
            batch.positions.copy_((built.batch.seq_lens - 1).clamp(min=0))
            if replayed:
                graph.replay()
            results.append((out if replayed else run()).clone())
        assert torch.equal(*results)
        assert all(bool((results[0][row] == 0).all()) == (length == 0) for row, length in enumerate(lens))
