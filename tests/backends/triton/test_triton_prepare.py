"""A step prepared by the Triton kernels is the one that the torch reference prepares, over the same memory."""

import pytest
import torch

from framework import step_ops
from framework_backends.cuda_step_ops import CudaStepOps

CHUNKS = [(1, 7, True), (130, 0, False), (20, 20, True), (3, 0, True), (1, 39, True)]
DECODES = [(1, 7, True), (1, 0, True), (1, 39, True), (1, 15, True)]


@pytest.mark.parametrize(
    "step", (CHUNKS, DECODES, [(5, 3, False)], [(1, 3, True)]), ids=("mixed", "1", "0 drawn", "row")
)
@pytest.mark.parametrize("sizes", ([4], [1, 16], [6, 4, 16]), ids=str)
def test_a_step_is_prepared_as_the_reference_prepares_it(steps, device, step, sizes):
    reference = steps.memory(step, sizes, 1)
    ours = steps.on(device, reference)
    counts = len(step), sum(n for n, _, _ in step), sum(drawn for _, _, drawn in step)
    step_ops.prepare(*reference, *counts)
    CudaStepOps().prepare(*ours, *counts, goes_on=False)
    for mine, theirs in zip(ours, reference, strict=True):
        steps.assert_equal(mine, theirs)


def test_a_token_finds_its_row_among_as_many_as_there_are(steps, device):
    step = [(1 + row, row, row % 2 == 0) for row in range(8)]
    reference = steps.memory(step, [4], 2)
    ours = steps.on(device, reference)
    step_ops.prepare(*reference, 8, 36, 4)
    CudaStepOps().prepare(*ours, 8, 36, 4, goes_on=False)
    steps.assert_equal(ours[0], reference[0])


RAGGED = {"mixed": [(1, 7, True), (13, 0, False), (20, 20, True)], "full": [(3, 7, True), (2, 0, False)] * 4}


@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_step_is_padded_behind_its_rows_its_tokens_and_its_logits_rows(steps, device, name):
    """Of 8 rows, 50 tokens and 5 logits rows, in blocks of 4 and of 16. Where all 8 rows run, tokens behind the last
    one's are padding all the same."""
    step, num_rows, num_tokens, num_logits = RAGGED[name], 8, 50, 5
    real, n = len(step), sum(count for count, _, _ in step)
    buffers, table = steps.padded(steps.memory(step, [4, 16], 5), num_rows - real)
    drawn = [row for row, (_, _, draws) in enumerate(step) if draws]
    buffers.num_scheduled[real:num_rows] = 0
    buffers.query_start_loc[real : num_rows + 1] = n
    buffers.logits_rows[len(drawn) : num_logits] = num_rows - 1
    table.token_ids[0, 0], table.num_computed_tokens.dev[0] = 17, 9  # row 0 counts for nothing, whatever it holds
    ours, known = steps.on(device, (buffers, table))
    CudaStepOps().prepare_ragged(ours, known, num_rows, num_tokens, num_logits)

    spans = [(int(buffers.rows[i]), range(past, past + count)) for i, (count, past, _) in enumerate(step)]
    tokens = [(row, position) for row, span in spans for position in span]
    padding = range(n, num_tokens)
    assert ours.positions[:num_tokens].tolist() == [p for _, p in tokens] + [0] * len(padding)
    assert ours.input_ids[:num_tokens].tolist() == [int(table.token_ids[at]) for at in tokens] + [17] * len(padding)
    for slots, blocks, size in zip(ours.slot_mapping, table.block_table, (4, 16), strict=True):
        expected = [int(blocks[row, p // size]) * size + p % size for row, p in tokens]
        assert slots[:num_tokens].tolist() == expected + [t % size for t in padding]
        assert slots[num_tokens:].unique().tolist() == [-7]
    lens = [count + past for count, past, _ in step] + [0] * (num_rows - real)
    assert ours.seq_lens[:num_rows].tolist() == lens
    logits = drawn + [num_rows - 1] * (num_logits - len(drawn))
    ends = buffers.query_start_loc.tolist()
    request = [int(buffers.rows[row]) for row in logits]
    assert ours.expanded_idx_mapping[:num_logits].tolist() == request
    assert ours.draw_positions[:num_logits].tolist() == [lens[row] for row in logits]
    assert ours.logits_indices[:num_logits].tolist() == [ends[row + 1] - 1 for row in logits]
    assert ours.seeds[:num_logits].tolist() == [int(table.seed.dev[row]) for row in request]
    assert name == "full" or request[len(drawn) :] == [0] * (num_logits - len(drawn))


@pytest.mark.parametrize("num_real", (0, 3))
def test_a_ragged_step_is_prepared_as_the_reference_prepares_it(steps, device, num_real):
    """Also one that nobody is in, as it is made at start-up."""
    buffers, table = steps.padded(steps.memory(RAGGED["mixed"], [6, 4], 5), 4)
    n = sum(count for count, _, _ in RAGGED["mixed"][:num_real])
    buffers.rows[num_real:7], buffers.num_scheduled[num_real:7] = 0, 0
    buffers.query_start_loc[num_real:8], buffers.logits_rows[:7] = n, torch.arange(7)
    reference = buffers, table
    ours = steps.on(device, reference)
    step_ops.prepare_ragged(*reference, 7, 40, 7)
    CudaStepOps().prepare_ragged(*ours, 7, 40, 7)
    for mine, theirs in zip(ours, reference, strict=True):
        steps.assert_equal(mine, theirs)
    assert ours[0].logits_indices[:7].min() == 0


@pytest.mark.parametrize("num_padding", (0, 4))
@pytest.mark.parametrize("sizes", ([4], [1, 16], [6, 4, 16]), ids=str)
def test_padded_decodes_are_prepared_as_the_reference_prepares_them(steps, device, num_padding, sizes):
    # Rows 0 and 2 enter a block in the first group, row 1 in the last; of row 2 it is the last of its table.
    new_blocks = [(0, 0, 501), (0, 2, 502), (len(sizes) - 1, 1, 503)]
    reference = steps.padded(steps.memory(DECODES, sizes, 3), num_padding, new_blocks)
    ours = steps.on(device, reference)
    step_ops.prepare_decodes(*reference, 4 + num_padding)
    CudaStepOps().prepare_decodes(*ours, 4 + num_padding)
    for mine, theirs in zip(ours, reference, strict=True):
        steps.assert_equal(mine, theirs)


def test_one_object_serves_the_memory_it_is_given(steps, device):
    ops = CudaStepOps()
    for seed in (1, 2, 1):
        reference = steps.memory(DECODES, [4], seed)
        ours = steps.on(device, reference)
        step_ops.prepare(*reference, 4, 4, 4)
        ops.prepare(*ours, 4, 4, 4, goes_on=True)
        steps.assert_equal(ours[0], reference[0])


@pytest.mark.cuda
def test_a_step_waits_for_nothing_and_decodes_can_be_captured(steps):
    device, ops = torch.device("cuda"), CudaStepOps()
    step = [(1, 7, True), (1, 0, True), (1, 15, True)]
    reference = steps.padded(steps.memory(step, [4, 16], 3), 5, [(0, 0, 501)])
    ours, sampled = steps.on(device, reference), torch.arange(8)
    on_device = sampled.to(device)
    again = steps.on(device, ours)

    def run(memory):
        ops.prepare_decodes(*memory, 8)
        ops.post_update(*memory, 8, 8, on_device)

    run(again)  # compiles
    ops.prepare(*again, 3, 3, 3, goes_on=False)
    ops.apply_spans(again[1].token_ids.view(-1), [3], [2], on_device.int())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(ours)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.prepare(*again, 3, 3, 3, goes_on=False)
        ops.apply_spans(again[1].token_ids.view(-1), [3], [2], on_device.int())
        for _ in range(3):
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        step_ops.prepare_decodes(*reference, 8)
        step_ops.post_update(*reference, 8, 8, sampled)
        reference[1].token_ids[0, 0] = 0  # of nobody: the reference alone writes there
    steps.assert_equal(ours[1], reference[1])
