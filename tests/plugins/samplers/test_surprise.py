"""Moments of the distribution inside an interval, of any number of rows."""

import pytest
import torch

from framework.sampling.groups import row_blocks
from framework.sampling.interval import inside, open_interval
from framework_samplers.surprise import moments


def interval_of(name, logits):
    lo, hi = open_interval(len(logits), logits.device)
    rising = logits.sort(-1).values
    above, below = rising[:, len(rising[0]) // 4].clone(), rising[:, -2].clone()
    return {"open": (lo, hi), "lo": (above, hi), "hi": (lo, below), "both": (above, below)}[name]


@pytest.mark.parametrize("name", ["open", "lo", "hi", "both"])
def test_moments_of_several_blocks_of_rows_are_those_of_the_rows_alone(name):
    logits = torch.randn(60, 5000, generator=torch.Generator().manual_seed(2)) * 3 + 500
    logits[::7, 1::2] = -torch.inf
    assert len(list(row_blocks(logits))) > 1
    lo, hi = interval_of(name, logits)
    found = moments(logits, lo, hi)
    kept = inside(logits, lo, hi).double()
    logprobs = kept.log_softmax(-1)
    torch.testing.assert_close(found.top, kept.amax(-1).float(), rtol=0, atol=0)
    torch.testing.assert_close(found.log_sum, kept.logsumexp(-1) - kept.amax(-1), rtol=0, atol=1e-5)
    entropy = -torch.where(kept > -torch.inf, logprobs.exp() * logprobs, 0.0).sum(-1)
    torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=1e-5)
    for row in (0, 7, 59):
        alone = moments(logits[row : row + 1], lo[row : row + 1], hi[row : row + 1])
        assert alone.log_sum == found.log_sum[row] and alone.entropy == found.entropy[row]
