"""The work items of a step: they cover each decode's keys once and in order, in no more records than were announced."""

import numpy as np
import pytest
import torch

from framework.testing.attention import AttentionCase


def listed(step, lens, scheduled=None, window=None, **decode):
    scheduled = scheduled or (1,) * len(lens)
    computed = tuple(a - b for a, b in zip(lens, scheduled, strict=True))
    case = AttentionCase("lens", computed, scheduled, num_heads=1, num_kv_heads=1, window=window)
    one = step(case, **decode)
    plan = one.plan()
    return one.attention, plan._items.cpu().numpy(), plan._tiles.cpu().numpy(), one.built.batch


@pytest.mark.parametrize("window", (None, 100))
@pytest.mark.parametrize(
    ("lens", "programs_per_sm", "is_cut"),
    [
        ((1,), 4, False),
        ((700,), 4, True),
        ((33, 1, 900, 64, 5), 2, True),
        ((40,) * 20, 1, False),
        ((1500, 2, 2), 50, True),
    ],
)
def test_items_cover_the_keys_of_each_decode_in_order(step, lens, window, programs_per_sm, is_cut):
    attention, items, _, batch = listed(
        step, lens, window=window, programs_per_sm=programs_per_sm, tile=32, good_keys=96
    )
    used = items[items[:, 0] > 0]
    assert len(items) == attention.max_items(batch.seq_lens_max_np)
    assert (items[len(used) :, 0] == 0).all()
    for row, length in enumerate(lens):
        mine = used[used[:, 2] == row]
        first = 0 if window is None else max(length - window, 0) // 32 * 32
        assert mine[:, 0].tolist() == [len(mine)] * len(mine) and mine[:, 1].tolist() == list(range(len(mine)))
        assert (mine[:, 3] == batch.rows_np[row]).all() and (mine[:, 6] == length).all()
        assert mine[0, 4] == min(first, length - 1) and mine[-1, 5] == length - 1
        assert (mine[1:, 4] == mine[:-1, 5]).all() and (mine[1:, 4] % 32 == 0).all()
    assert window is not None or (len(used) > len(lens)) == is_cut


@pytest.mark.parametrize("window", (None, 1, 100))
def test_no_lengths_give_more_items_than_were_announced(step, window):
    rng = np.random.default_rng(0)
    for _ in range(12):
        lens = tuple(int(n) for n in np.exp(rng.uniform(0, 7.5, rng.integers(1, 30))))
        words = {"programs_per_sm": int(rng.integers(1, 60)), "tile": 16, "min_keys": 16, "good_keys": 128}
        attention, items, _, _ = listed(step, lens, window=window, **words)
        bound = attention.max_items(np.full(len(lens), 4096))
        used = int((items[:, 0] > 0).sum())
        assert used == sum(items[items[:, 2] == row, 0].max() for row in range(len(lens))) <= bound


def test_tiles_cover_the_queries_of_prompts_and_of_nothing_else(step):
    lens, scheduled = (300, 9, 40, 201), (290, 1, 40, 130)
    attention, _, tiles, batch = listed(step, lens, scheduled)
    starts = np.cumsum((0, *scheduled))
    assert set(tiles[:, 3 - 1]) == set(batch.rows_np[[0, 2, 3]])
    seen = np.concatenate([np.arange(first, first + count) for count, first in tiles[:, :2]])
    assert sorted(seen) == [*range(290), *range(291, 331), *range(331, 461)]
    for count, first, table_row, position in tiles[:, :4]:
        row = int(np.flatnonzero(batch.rows_np == table_row)[0])
        assert count <= attention.tile_queries
        assert position - first == lens[row] - scheduled[row] - starts[row]


def test_steps_of_decodes_get_the_same_shapes_whatever_their_lengths_are(step):
    shapes = set()
    for lens in ((1, 1, 1), (900, 3, 50)):
        case = AttentionCase("lens", tuple(n - 1 for n in lens), (1,) * len(lens))
        one = step(case)
        one.built.batch.seq_lens_max_np[:] = 4096
        shapes.add(one.plan()._items.shape)
    assert len(shapes) == 1
    assert torch.Size((1, 8)) not in shapes


def test_a_window_bounds_what_a_captured_step_launches(step):
    words = {"num_heads": 2, "num_kv_heads": 2}
    long = np.full(1, 4096)
    whole = step(AttentionCase("rows", (3,), (1,), **words)).attention
    windowed = step(AttentionCase("rows", (3,), (1,), window=128, **words)).attention
    assert windowed.max_items(long) == -(-(128 + windowed.decode.tile) // windowed.decode.min_keys) == 3
    by_keys, by_programs = -(-4096 // whole.decode.min_keys), 1 + -(-whole.programs(long) // 2)
    assert whole.max_items(long) == min(by_keys, by_programs) > 3


def test_few_rows_of_bounded_lengths_launch_fewer_programs(step, monkeypatch):
    """What a captured step launches for nothing costs time; long contexts want many programs all the same."""
    from framework_attention.triton import attention as triton_attention

    attention = step(AttentionCase("rows", (3,), (1,), num_heads=2, num_kv_heads=2)).attention
    few, long, many = np.full(2, 16384), np.full(2, 16385), np.full(3, 16384)
    monkeypatch.setattr(triton_attention, "_num_multiprocessors", lambda device: 4)
    assert [attention.programs(lens) for lens in (few, long, many)] == [8, 16, 16]
    assert [attention.max_items(lens) for lens in (few, long, many)] == [2 + 4, 2 + 8, 3 + 8]
