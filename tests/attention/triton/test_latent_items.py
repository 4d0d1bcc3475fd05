"""Lists of a latent step: parts cover each query's keys once and in order, in no more records than were announced."""

import numpy as np
import pytest
import torch

from framework.testing.attention import AttentionCase, LatentSizes, build

from .latent_steps import LatentStep

SIZES = LatentSizes(16, 16, 16, 16)


def step_of(device, lens, scheduled, padding=0, **words):
    computed = tuple(a - b for a, b in zip(lens, scheduled, strict=True))
    case = AttentionCase("lens", computed, scheduled, num_heads=1, padding_tokens=padding, latent=SIZES)
    return LatentStep(build(case, 16, torch.float32), device, 16, **words)


@pytest.mark.parametrize(
    ("lens", "programs_per_sm"), [((1,), 4), ((700,), 4), ((33, 1, 900, 64, 5), 2), ((40,) * 20, 1), ((1500, 2), 50)]
)
def test_parts_cover_the_keys_of_each_decode_in_order(device, lens, programs_per_sm):
    one = step_of(device, lens, (1,) * len(lens), programs_per_sm=programs_per_sm, tile=32, good_keys=96)
    (some,) = one.plan()._absorbed
    parts, first = some.parts.cpu().numpy(), some.queries.first.tolist()
    used = parts[parts[:, 0] > 0]
    assert (parts[len(used) :, 0] == 0).all() and some.queries.length.tolist() == list(lens)
    assert some.queries.row.tolist() == one.built.batch.rows_np.tolist()
    for row, length in enumerate(lens):
        mine = used[used[:, 2] == row]
        assert mine[:, 0].tolist() == [len(mine)] * len(mine) and mine[:, 1].tolist() == list(range(len(mine)))
        assert mine[0, 3] == 0 and mine[-1, 4] == length and (parts[first[row]] == mine[0]).all()
        assert (mine[1:, 3] == mine[:-1, 4]).all() and (mine[1:, 3] % 32 == 0).all()


def test_no_lengths_give_more_parts_than_were_announced(device):
    rng = np.random.default_rng(0)
    for _ in range(6):
        lens = tuple(int(n) for n in np.exp(rng.uniform(0, 7.5, rng.integers(1, 30))))
        words = {"programs_per_sm": int(rng.integers(1, 60)), "tile": 16, "min_keys": 16, "good_keys": 128}
        one = step_of(device, lens, (1,) * len(lens), **words)
        (some,) = one.plan()._absorbed
        parts = some.parts.cpu()
        used = int((parts[:, 0] > 0).sum())
        assert used == sum(parts[parts[:, 2] == row, 0].max() for row in range(len(lens)))
        assert used <= one.attention.max_parts(np.full(len(lens), 4096))


def test_each_token_of_chunks_is_a_query_with_the_keys_up_to_its_own(device):
    lens, scheduled = (30, 0, 9, 40, 21), (20, 0, 1, 40, 3)
    one = step_of(device, lens, scheduled, padding=4)
    (some,) = one.plan()._absorbed
    expected = [n for length, count in zip(lens, scheduled, strict=True) for n in range(length - count + 1, length + 1)]
    assert some.queries.length.tolist() == [*expected, 0, 0, 0, 0]
    assert some.queries.token.tolist() == list(range(68))
    rows = np.repeat(one.built.batch.rows_np, scheduled)
    assert some.queries.row.tolist()[:64] == rows.tolist()


def test_steps_of_decodes_get_the_same_shapes_whatever_their_lengths_are(device):
    shapes = set()
    for lens in ((1, 1, 1), (900, 3, 50)):
        one = step_of(device, lens, (1, 1, 1))
        one.built.batch.seq_lens_max_np[:] = 4096
        (some,) = one.plan()._absorbed
        shapes.add(some.parts.shape)
    assert len(shapes) == 1
