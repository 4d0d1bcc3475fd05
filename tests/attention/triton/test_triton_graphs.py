"""Captured steps of decodes: plan and forward are recorded once, and replays serve other lengths, rows and blocks."""

from dataclasses import replace

import pytest
import torch

from framework.interfaces import HeadNorms, Rotation
from framework.testing.attention import AttentionCase, build

LENS = ((40, 3, 700, 1), (1, 1500, 64, 300), (0, 17, 0, 128))


def case_of(lens):
    return AttentionCase("lens", tuple(max(n - 1, 0) for n in lens), (1,) * 4, num_heads=8, num_kv_heads=2, head_dim=64)


def inputs(lens, seed, dtype):
    """A step of four rows, those of length 0 padding."""
    built = build(case_of(lens), 16, dtype, seed)
    for row, length in enumerate(lens):
        if length == 0:
            built.batch.seq_lens[row] = 0
            built.batch.idx_mapping[row] = 0
    return built


@pytest.mark.cuda
@pytest.mark.parametrize("is_invariant", (False, True), ids=("fast", "invariant"))
@pytest.mark.parametrize("has_projections", (False, True), ids=("forward", "projections"))
def test_replays_of_one_capture_equal_eager_steps(step_of, is_invariant, has_projections):
    dtype = torch.bfloat16
    widest = build(case_of((1500,) * 4), 16, dtype)
    one = step_of(widest, is_invariant=is_invariant)
    one.kv.normal_()
    on, batch = one.device, one.batch()
    columns = batch.block_table[0].shape[1]
    batch = replace(batch, seq_lens_max_np=widest.batch.seq_lens_max_np * 0 + 4096)
    heads = torch.zeros(4, 8 + 4, 64, dtype=dtype, device=on)
    rotation = Rotation(torch.randn(4096, 2, 64, device=on), batch.positions)
    norms = HeadNorms(*torch.rand(2, 64, device=on).to(dtype), 1e-6)

    def run():
        plan = one.attention.plan(batch, 0)
        if has_projections:
            return plan.forward_projections(0, heads, rotation, norms)
        return plan.forward(0, *heads.split((8, 2, 2), dim=1))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, lens in enumerate(LENS):
        built = inputs(lens, seed, dtype)
        projected = torch.cat((built.q, built.k, built.v), dim=1)
        kv = one.kv.clone()
        results = []
        for replayed in (True, False):
            one.kv.copy_(kv)
            heads.copy_(projected)
            table = torch.nn.functional.pad(built.batch.block_table[0], (0, columns))[:, :columns]
            batch.block_table[0].copy_(table)
            batch.slot_mapping[0].copy_(built.batch.slot_mapping[0])
            batch.seq_lens.copy_(built.batch.seq_lens)
            batch.idx_mapping.copy_(built.batch.idx_mapping)
            batch.positions.copy_((built.batch.seq_lens - 1).clamp(min=0))
            if replayed:
                graph.replay()
            results.append((out if replayed else run()).clone())
        assert torch.equal(*results)
        assert all(bool((results[0][row] == 0).all()) == (length == 0) for row, length in enumerate(lens))
