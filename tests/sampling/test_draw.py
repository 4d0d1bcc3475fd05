"""The draw follows softmax, depends on its row alone, and never leaves the kept interval."""

import numpy as np
import pytest
import torch
from scipy import stats

from framework import rng
from framework.sampling.draw import draw
from framework.sampling.groups import GROUP, kept_mass, log_mass, row_blocks
from framework.sampling.interval import open_interval

from .reference import draw as slow_draw

CPU = torch.device("cpu")


def draws(logits, seeds, positions, lo=None, hi=None, stream=rng.TARGET):
    free_lo, free_hi = open_interval(len(logits), CPU)
    return draw(
        logits,
        torch.as_tensor(seeds),
        torch.as_tensor(positions),
        free_lo if lo is None else lo,
        free_hi if hi is None else hi,
        stream,
    )


def repeated(row, count, start=0):
    """`count` draws from one row of logits, at successive positions of one seed."""
    parts = []
    for first in range(start, start + count, 20_000):
        positions = torch.arange(first, min(first + 20_000, start + count))
        parts.append(draws(row.expand(len(positions), -1), torch.full_like(positions, 99), positions))
    return torch.cat(parts)


def p_value(ids, probs):
    """Of a chi-square test; cells that expect fewer than five draws are merged."""
    counts = np.bincount(ids.numpy(), minlength=len(probs)).astype(float)
    expected = probs.double().numpy() * len(ids)
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    kept = wanted > 0
    assert seen[~kept].sum() == 0, "drew what has no probability"
    return stats.chisquare(seen[kept], wanted[kept] * seen[kept].sum() / wanted[kept].sum()).pvalue


def random_logits(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_draws_have_their_known_answers():
    logits = ((torch.arange(300) * 37) % 101).float().mul_(0.1).expand(6, -1)
    ids = draws(logits, [0, 1, 2, -1, 42, 42], [0, 0, 0, 5, 9, 10])
    assert ids.tolist() == [232, 90, 218, 19, 221, 262]


def test_draw_agrees_with_a_second_implementation():
    logits = random_logits(40, 515)
    ids = draws(logits, torch.arange(40), torch.arange(40) * 3).tolist()
    for row in range(40):
        expected, gap = slow_draw(logits[row].double().numpy(), row, row * 3)
        assert ids[row] == expected or gap < 1e-5


@pytest.mark.parametrize("vocab", [1, 5, 128, 300, 1024])
def test_draws_follow_softmax(vocab):
    row = random_logits(1, vocab, seed=vocab, scale=1.5)[0]
    ids = repeated(row, 40_000)
    assert int(ids.min()) >= 0 and int(ids.max()) < vocab
    if vocab > 1:
        assert p_value(ids, row.softmax(-1)) > 1e-4


def test_the_chi_square_test_would_notice_a_wrong_law():
    row = random_logits(1, 300, seed=300, scale=1.5)[0]
    ids = repeated(row, 40_000)
    assert p_value(ids, (row * 1.05).softmax(-1)) < 1e-6


def test_draws_follow_softmax_of_the_interval():
    row = random_logits(1, 300, seed=5, scale=1.0)[0]
    values = row.sort(descending=True).values
    lo, hi = values[60].expand(30_000), values[3].expand(30_000)
    ids = draws(row.expand(30_000, -1), torch.full((30_000,), 7), torch.arange(30_000), lo, hi)
    kept = row.masked_fill((row < lo[0]) | (row > hi[0]), float("-inf"))
    assert p_value(ids, kept.softmax(-1)) > 1e-4
    assert set(ids.tolist()) <= set(kept.isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("vocab", [1, 3, 130])
def test_an_interval_that_keeps_the_last_token_alone_gives_that_one(vocab):
    logits = torch.zeros(500, vocab)
    logits[:, -1] = 1.0
    lo = torch.full((500,), 1.0)
    ids = draws(logits, torch.zeros(500, dtype=torch.int64), torch.arange(500), lo, lo)
    assert set(ids.tolist()) == {vocab - 1}


def test_unlikely_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should():
    tail, gap, trials = 131_072, 18.0, 4_000
    row = torch.full((tail + GROUP,), -gap)
    row[:GROUP] = float("-inf")
    row[0] = 0.0
    hits = 0
    for first in range(0, trials, 20):
        positions = torch.arange(first, first + 20)
        hits += int((draws(row.expand(20, -1), torch.full((20,), 1), positions) != 0).sum())
    p = tail * np.exp(-gap) / (1 + tail * np.exp(-gap))
    assert stats.binomtest(hits, trials, p).pvalue > 1e-3, f"{hits} hits, expected {trials * p:.1f}"
    # Negative control: noise with an epsilon in both logarithms spans less than the gap, so it can never hit.
    epsilon = 1e-6
    assert -np.log(epsilon) + np.log(-np.log(epsilon) + epsilon) < gap


@pytest.mark.parametrize("vocab", [300, 1000, 4096])
def test_a_row_draws_the_same_token_in_any_batch(vocab):
    logits = random_logits(33, vocab)
    seeds, positions = torch.arange(33) * 7919 - 50, torch.arange(33) % 5
    lo = logits.sort(-1).values[:, 40].clone()
    _, hi = open_interval(33, CPU)
    together = draws(logits, seeds, positions, lo, hi)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draws(logits[order], seeds[order], positions[order], lo[order]), together[order])
    for size in (1, 2, 5, 16):
        part = torch.cat([draws(logits[i : i + size], seeds[i : i + size], positions[i : i + size], lo[i : i + size])
                          for i in range(0, 33, size)])  # fmt: skip
        assert torch.equal(part, together)


def test_scores_are_bit_equal_for_any_number_of_rows():
    logits = random_logits(60, 5000)  # more than one block of rows
    assert len(list(row_blocks(logits))) > 1
    top = logits.amax(-1, keepdim=True)
    lo = top.squeeze(1) - 5
    sums, total = kept_mass(logits, top, lo), log_mass(logits, top)
    for start, size in ((0, 1), (3, 1), (5, 2), (9, 7), (15, 45)):
        part = slice(start, start + size)
        assert torch.equal(kept_mass(logits[part], top[part], lo[part]), sums[part])
        assert torch.equal(log_mass(logits[part], top[part]), total[part])


def test_seed_position_and_stream_each_change_the_draw():
    logits = torch.zeros(64, 4096)
    base = draws(logits, torch.zeros(64, dtype=torch.int64), torch.arange(64))
    other_seed = draws(logits, torch.ones(64, dtype=torch.int64), torch.arange(64))
    other_stream = draws(logits, torch.zeros(64, dtype=torch.int64), torch.arange(64), stream=rng.DRAFT)
    for other in (other_seed, other_stream):
        assert int((base == other).sum()) < 5
    assert len(set(base.tolist())) > 50


def test_a_masked_token_is_never_drawn():
    logits = torch.full((2000, 400), float("-inf"))
    logits[:, [3, 130, 399]] = torch.tensor([0.0, 0.5, 0.2])
    ids = draws(logits, torch.arange(2000), torch.arange(2000))
    assert set(ids.tolist()) == {3, 130, 399}


def test_a_low_temperature_leaves_the_noise_its_precision():
    row = torch.zeros(256)
    row[[5, 200]] = 1e5
    share = (repeated(row, 4000) == 5).float().mean()
    assert abs(float(share) - 0.5) < 0.04


def test_a_low_temperature_leaves_equal_tokens_of_a_group_their_frequencies():
    row = torch.full((256,), 9.9e4)
    row[[5, 9, 77, 200]] = 1e5
    scaled = row * (1 / torch.tensor(1e-4))  # where float32 counts in steps of 64
    ids = repeated(scaled, 4000)
    assert p_value(ids, (row - 1e5).mul(1e4).softmax(-1)) > 1e-4
    assert set(ids.tolist()) == {5, 9, 77, 200}


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
def test_a_row_without_a_distribution_gives_an_id_in_range(value):
    logits = random_logits(3, 300)
    fine = draws(logits, [1, 2, 3], [0, 0, 0])
    logits[1] = value
    ids = draws(logits, [1, 2, 3], [0, 0, 0])
    assert 0 <= int(ids[1]) < 300
    assert ids[0] == fine[0] and ids[2] == fine[2]
