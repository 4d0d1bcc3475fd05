"""The two ends of a pipeline: greedy takes the best kept token, gumbel draws one of the kept."""

import pytest
import torch
from scipy import stats

from framework import SamplingParams
from framework.sampling.interval import open_interval
from framework.testing.stages import context, make_rows
from framework_samplers.greedy import Greedy
from framework_samplers.gumbel import Gumbel


def select(target, logits, interval=None, **where):
    rows = make_rows(range(1, len(logits) + 1), **where)
    stage = target({}, context(target.spec, logits.shape[1], len(logits) + 1))
    return stage.select(logits, rows, *(interval or open_interval(len(logits), torch.device("cpu"))))


def test_greedy_takes_the_lowest_of_equal_ids():
    assert select(Greedy, torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])).tolist() == [1, 0]


def test_greedy_stays_inside_the_interval():
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    assert select(Greedy, logits, (torch.tensor([0.0]), torch.tensor([4.5]))).tolist() == [1]


def test_greedy_refuses_a_named_temperature_only():
    stage = Greedy({}, context(Greedy.spec))
    for fine in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(temperature=2.0, top_k=1)):
        stage.validate(fine)
    with pytest.raises(ValueError, match=r"temperature=0\.5 would be ignored"):
        stage.validate(SamplingParams(temperature=0.5))


def test_gumbel_follows_softmax_over_seeds():
    """Unlike positions of one seed: what independent requests see."""
    row = torch.tensor([0.0, 1.0, -1.0, 2.0])
    seeds = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = select(Gumbel, row.expand(20_000, -1), seeds=seeds, positions=[4] * 20_000)
    counts = torch.bincount(ids, minlength=4).numpy()
    assert stats.chisquare(counts, (row.double().softmax(-1) * 20_000).numpy()).pvalue > 1e-4


def test_gumbel_uses_the_seed_and_the_position_of_the_row():
    logits = torch.zeros(4, 1000)
    ids = select(Gumbel, logits, seeds=[1, 1, 2, 1], positions=[5, 6, 5, 5]).tolist()
    assert ids[0] == ids[3]
    assert len(set(ids)) == 3
