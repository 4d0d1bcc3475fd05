"""The Triton kernel that ends a step leaves the request table as the torch reference leaves it."""

import pytest
import torch

from framework import step_ops
from framework_backends.cuda_step_ops import CudaStepOps

MIXED = [(1, 7, True), (5, 0, False), (20, 20, True), (3, 0, False), (1, 39, True)]
DECODES = [(1, 7, True), (1, 0, True), (1, 39, True), (1, 15, True)]


@pytest.mark.parametrize("step", (MIXED, DECODES, [(5, 3, False)]), ids=("mixed", "decodes", "nothing drawn"))
def test_lengths_advance_and_drawn_tokens_are_appended(steps, device, step):
    reference = steps.memory(step, [4], 1)
    counts = len(step), sum(drawn for _, _, drawn in step)
    step_ops.prepare(*reference, counts[0], sum(n for n, _, _ in step), counts[1])
    ours = steps.on(device, reference)
    sampled = torch.randint(0, 2**31, (counts[1],))
    step_ops.post_update(*reference, *counts, sampled)
    CudaStepOps().post_update(*ours, *counts, sampled.to(device))
    steps.assert_equal(ours[1], reference[1])


def test_padding_rows_leave_the_table_as_it_is(steps, device):
    reference = steps.padded(steps.memory(DECODES, [4, 16], 2), 5)
    step_ops.prepare_decodes(*reference, 9)
    ours = steps.on(device, reference)
    sampled = torch.arange(9) + 100
    before = ours[1].token_ids.clone()
    CudaStepOps().post_update(*ours, 9, 9, sampled.to(device))
    step_ops.post_update(*reference, 9, 9, sampled)
    assert torch.equal(ours[1].token_ids[0], before[0])
    reference[1].token_ids[0, 0] = before[0, 0]
    steps.assert_equal(ours[1], reference[1])
