"""Logprobs, ranks and best ids in Triton against those of torch."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from framework import SamplingParams
from framework.sampling.logprobs import measure, to_host
from framework_backends.triton import sampler_ops
from framework_backends.triton.sampler_ops import TritonSamplerOps, _empty_choice, _empty_logprobs


def told_of(logits, ids, k, is_log, ops=None):
    ops = ops or TritonSamplerOps(block_groups=4)
    return ops.logprobs(logits, ids, k, is_log=is_log)


@pytest.mark.parametrize("is_log", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_ranks_and_best_ids_are_those_of_torch(device, k, dtype, is_log):
    generator = torch.Generator().manual_seed(k)
    logits = (torch.randn(3, 700, generator=generator) * 2.5).to(dtype)  # bfloat16: many ties
    logits[1, 30:] = -torch.inf
    logits[2] = 1.0
    ids = torch.tensor([5, 11, 699])
    told = told_of(logits.to(device), ids.to(device), k, is_log)
    expected = to_host(measure(logits, ids, k, is_log=is_log), 3)
    assert told.rank.tolist() == expected.rank.tolist()
    np.testing.assert_allclose(told.sampled.cpu(), expected.sampled, atol=1e-5)
    assert told.top_ids.tolist() == expected.top_ids.tolist()
    assert told.top_ranks.tolist() == expected.top_ranks.tolist()
    np.testing.assert_allclose(told.top_logprobs.cpu(), expected.top_logprobs, atol=1e-5)


def test_masked_tokens_are_told_behind_all_others(device):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 290]] = torch.tensor([1.0, 2.0])
    told = told_of(logits.to(device), torch.tensor([9], device=device), 5, True)
    assert told.top_ids.tolist() == [[290, 7, 0, 1, 2]]
    assert told.top_ranks.tolist() == [[1, 2, 3, 3, 3]]
    assert told.sampled.tolist() == [-torch.inf] and told.rank.tolist() == [3]


def test_a_pipeline_tells_the_same_by_either_side(pair):
    words = [{"logprobs": 0}, {"logprobs": 3, "temperature": 0}, {}]
    one = pair().add(*[SamplingParams(**w) for w in words])
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    plain, fused = one.compare(logits)
    _, expected, _ = one.plain.pipeline.collect(plain)
    _, found, _ = one.fused.pipeline.collect(fused)
    for name in ("sampled", "rank", "top_ids", "top_logprobs", "top_ranks"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-5, err_msg=name)


def test_results_stand_in_one_piece_of_memory_each(device):
    for made in (_empty_choice(3, device), _empty_logprobs(3, 5, device)):
        tensors = [getattr(made, field.name) for field in fields(made)]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        for place, tensor in enumerate(tensors):
            tensor.fill_(place)
        assert [set(tensor.flatten().tolist()) for tensor in tensors] == [{i} for i in range(len(tensors))]


def test_scratch_of_batches_that_grow_row_by_row_is_twice_the_largest_at_most(device):
    ops = TritonSamplerOps(block_groups=4)
    for count in (1, 2, 3, 4, 5, 6, 9):
        ops.logprobs(torch.zeros(count, 130, device=device), torch.zeros(count, dtype=torch.int64, device=device), 0,
                     is_log=True)  # fmt: skip
    assert [one.num_rows for one in (*ops._outgrown, *ops._scratch.values())] == [1, 2, 4, 8, 16]


def test_scratch_of_a_recording_that_is_never_run_serves_no_later_step(device, monkeypatch):
    ops, ids = TritonSamplerOps(block_groups=4), torch.tensor([5, 11], device=device)
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(3)).to(device)
    expected = told_of(logits, ids, 2, True)
    with monkeypatch.context() as recording:
        recording.setattr(sampler_ops, "is_recorded", lambda device: True)
        recording.setattr(torch, "zeros", torch.ones)  # what should make zeros is recorded, too
        told_of(-logits, ids, 2, True, ops)
    told = told_of(logits, ids, 2, True, ops)
    assert told.rank.tolist() == expected.rank.tolist() and told.top_ids.tolist() == expected.top_ids.tolist()
