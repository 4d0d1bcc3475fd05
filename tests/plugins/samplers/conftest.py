"""One stage alone, with the parameters of each row of logits."""

import pytest
import torch

from framework.sampling.interval import inside, open_interval
from framework.testing.stages import context, make_rows, new_request


@pytest.fixture
def run_stage():
    """run_stage(Stage, [params of each row], logits [L, V], interval) -> the logits after it, -inf = dropped."""

    def run(target, requests, logits, interval=None):
        stage = target({}, context(target.spec, logits.shape[1], len(requests) + 1))
        for row, params in enumerate(requests, start=1):
            stage.validate(params)
            stage.add_request(row, params, new_request(row, params))
        rows = make_rows(range(1, len(requests) + 1))
        logits = logits.clone()
        if target.spec.kind == "elementwise":
            stage.apply(logits, rows)
            return logits
        lo, hi = interval or open_interval(len(logits), torch.device("cpu"))
        return inside(logits, *stage.bounds(logits, rows, lo, hi))

    return run


@pytest.fixture
def random_logits():
    def make(rows, vocab, seed=0, scale=3.0):
        return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale

    return make
