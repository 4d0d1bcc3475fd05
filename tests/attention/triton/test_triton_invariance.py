"""`batch_invariant`: a query's bits depend on its request alone, not on chunks, neighbours or the prefix cache."""

from dataclasses import replace

import pytest
import torch

from framework.testing.attention import AttentionCase, batch_of, build

WHOLE = AttentionCase("whole", (0,), (75,), num_heads=4, num_kv_heads=2)


def part(built, computed, end, neighbours=()):
    """The span computed .. end of the whole request, behind other requests' spans (computed, scheduled)."""
    case = built.case
    past = (*(one[0] for one in neighbours), computed)
    scheduled = (*(one[1] for one in neighbours), end - computed)
    several = replace(case, computed=past, scheduled=scheduled)
    other = build(several, 16, built.q.dtype, seed=5)
    first = other.num_blocks
    last_row = int(other.batch.rows_np[-1])
    table = other.batch.block_table[0]
    mine = built.batch.block_table[0][int(built.batch.rows_np[0])]
    width = max(table.shape[1], len(mine))
    wide = torch.zeros(len(table), width, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    wide[last_row] = 0
    wide[last_row, : len(mine)] = torch.where(mine > 0, mine + first, 0)
    batch = batch_of(several, 16, other.batch.rows_np.tolist(), wide)
    positions = torch.arange(computed)
    slots = wide[last_row].long()[positions // 16] * 16 + positions % 16
    span, n = slice(computed, end), end - computed
    q, k, v = (torch.cat((b[: len(b) - n], a[span])) for a, b in zip(
        (built.q, built.k, built.v), (other.q, other.k, other.v), strict=True
    ))  # fmt: skip
    return replace(
        other, sinks=built.sinks, batch=batch, q=q, k=k, v=v, num_blocks=first + built.num_blocks,
        past=[*other.past[:-1], (built.k[:computed], built.v[:computed])], past_slots=[*other.past_slots[:-1], slots],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "dtype"),
    [({}, torch.float16), ({"window": 20}, torch.float32),
     ({"window": 20, "softcap": 1.5, "has_sinks": True}, torch.float16)],
    ids=("plain", "window", "window_softcap_and_sinks"),
)  # fmt: skip
def test_bits_depend_neither_on_chunks_nor_on_neighbours(step_of, words, dtype):
    built = build(replace(WHOLE, **words), 16, dtype)
    whole = step_of(built, is_invariant=True).forward()
    cuts = [(74, 75, ()), (40, 75, ()), (0, 33, ()), (64, 65, ((0, 40), (33, 1), (70, 1)))]
    for computed, end, neighbours in cuts:
        out = step_of(part(built, computed, end, neighbours), is_invariant=True).forward()
        assert torch.equal(out[computed - end :], whole[computed:end]), f"{computed} to {end} beside {neighbours}"


@pytest.mark.cuda
@pytest.mark.parametrize("heads", ((32, 8), (16, 8), (6, 2)))
def test_bits_of_long_requests_depend_on_nothing_else_on_a_device(step_of, heads):
    case = AttentionCase("long", (0,), (1500,), num_heads=heads[0], num_kv_heads=heads[1], head_dim=128)
    built = build(case, 16, torch.bfloat16)
    whole = step_of(built, is_invariant=True).forward()
    for computed, end, neighbours in [(1499, 1500, ()), (700, 1500, ()), (1000, 1001, ((0, 400), (33, 1), (1200, 1)))]:
        out = step_of(part(built, computed, end, neighbours), is_invariant=True).forward()
        assert torch.equal(out[computed - end :], whole[computed:end])
