"""Row bounds of min-p, top-k and top-p in Triton, exactly those of the stages, for peaked, flat and odd rows."""

import math

import pytest
import torch

from framework import SamplingParams
from framework.sampling.interval import open_interval

VOCAB = 600


def rows_of_kinds(vocab=VOCAB):
    """Peaked, flat, very flat, one value, two values, mostly masked."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(6, vocab, generator=generator)
    logits = noise * torch.tensor([[4.0], [1.0], [0.01], [0.0], [0.0], [2.0]])
    logits[4, ::3] = 1.0
    logits[5, 20:] = -torch.inf
    return logits.to(torch.bfloat16).float() / torch.tensor([[0.7], [1.0], [1.3], [1.0], [1.0], [1.0]])


def bounds_of(pair, chain, logits, interval=None):
    """[2, L] lower bounds of the stages and of the kernels for rows of a pipeline."""
    logits = logits.to(pair.device)
    rows = pair.logits_rows()
    pair.plain.table.apply()
    pair.fused.table.apply()
    lo, hi = interval or open_interval(len(logits), logits.device)
    expected, links = lo, []
    for one, other in zip(pair.plain.pipeline.stages, pair.fused.pipeline.stages, strict=True):
        if one.key in chain:
            expected, _ = one.stage.bounds(logits, rows, expected, hi)
            links.append((other.spec.fused, other.stage.operands(rows)))
    ops = pair.fused.pipeline._fused._ops
    return expected, ops.bounds(logits, rows, links, lo, hi)[0]


def kept(logits, lo):
    return logits >= lo.cpu().unsqueeze(1)


MIXES = [
    {"top_k": 1 + 1}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 1e-6}, {"top_p": 0.37},
    {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 100, "top_p": 0.8}, {"top_k": 500, "top_p": 0.99},
    {"min_p": 0.01, "top_p": 0.9}, {"min_p": 0.3, "top_k": 5, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("words", MIXES, ids=str)
def test_bounds_are_those_of_the_stages(pair, words):
    compare(pair, words)


SHORT_LISTS = [{"top_p": 0.9}, {"min_p": 0.01, "top_p": 0.8}, {"top_k": 200, "top_p": 0.9}]


@pytest.mark.parametrize("words", SHORT_LISTS, ids=str)
def test_rows_with_more_candidates_than_the_list_holds_are_narrowed_or_walked_over(pair, words):
    compare(pair, words, capacity=64)


@pytest.mark.cuda
@pytest.mark.parametrize("words", [*MIXES, {"top_k": 3000}, {"top_k": 90000, "top_p": 0.5}], ids=str)
def test_bounds_in_a_real_vocabulary_are_those_of_the_stages(pair, words):
    compare(pair, words, vocab=151936, block_groups=32, row_groups=16)


def compare(pair, words, vocab=VOCAB, **ops):
    logits = rows_of_kinds(vocab)
    one = pair("min_p", "top_k", "top_p", "gumbel", vocab=vocab, **ops)
    one.add(*[SamplingParams(**words)] * len(logits))
    expected, found = bounds_of(one, ("min_p", "top_k", "top_p"), logits)
    assert torch.equal(kept(logits, found), kept(logits, expected))
    assert ((found == expected) | (kept(logits, found).all(1).to(found.device))).all()


def test_rows_with_different_limits_share_a_launch(pair):
    words = [{"top_k": 3}, {"top_p": 0.5}, {}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9}, {"temperature": 0}]
    one = pair("min_p", "top_k", "top_p", "gumbel", vocab=VOCAB).add(*[SamplingParams(**w) for w in words])
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, VOCAB, generator=generator) * 3
    expected, found = bounds_of(one, ("min_p", "top_k", "top_p"), logits)
    assert torch.equal(found, expected)
    assert found[[2, 5]].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("words", [{"top_k": 30}, {"top_p": 0.6}, {"min_p": 0.05, "top_p": 0.9}], ids=str)
def test_only_the_incoming_interval_counts(pair, words):
    logits = rows_of_kinds()[[0, 1, 5]]
    one = pair("min_p", "top_k", "top_p", "gumbel", vocab=VOCAB).add(*[SamplingParams(**words)] * 3)
    falling = logits.sort(-1, descending=True).values
    interval = falling[:, 250].clone().to(one.device), falling[:, 7].clone().to(one.device)
    expected, found = bounds_of(one, ("min_p", "top_k", "top_p"), logits, interval)
    assert torch.equal(found, expected)


def test_random_rows_and_limits_agree(pair):
    generator = torch.Generator().manual_seed(11)
    for round in range(3):
        spread = torch.rand(4, 1, generator=generator) * 5
        logits = (torch.randn(4, VOCAB, generator=generator) * spread).to(torch.bfloat16).float()
        number = torch.rand(3, 4, generator=generator).tolist()
        words = [
            {"top_k": 1 + int(k * VOCAB) if round % 2 else 2 + int(k * 60), "top_p": max(p, 1e-3), "min_p": m / 10}
            for k, p, m in zip(*number, strict=True)
        ]
        one = pair("min_p", "top_k", "top_p", "gumbel", vocab=VOCAB).add(*[SamplingParams(**w) for w in words])
        expected, found = bounds_of(one, ("min_p", "top_k", "top_p"), logits)
        assert torch.equal(kept(logits, found), kept(logits, expected)), words
