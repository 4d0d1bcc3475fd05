"""One stage alone: with the parameters of each row of logits, or with the tokens that each row has had."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from framework.batch import NewRequest, Rows
from framework.sampling.interval import inside, open_interval
from framework.testing.stages import context, make_rows, new_request


class Driven:
    """A stage with requests in rows 1, 2, ..., their tokens on the device, steps and commits with or without drafts."""

    def __init__(self, target, vocab, *, rows=8, encode=None):
        self.ctx = replace(context(target.spec, vocab, rows + 1), encode=encode)
        self.stage = target({}, self.ctx)
        self.tokens = {}

    def add(self, params, prompt, outputs=(), row=None):
        """The row of a request that arrives, or comes back with its outputs."""
        row = row or len(self.tokens) + 1
        self.stage.validate(params)
        self.tokens[row] = [*prompt, *outputs]
        new = NewRequest(row, str(row), np.array(self.tokens[row], np.int32), len(prompt), 0, params, 0)
        self.stage.add_request(row, params, new)
        return row

    def step(self, rows, drafts=None):
        """Logits rows of these table rows; drafts: {row: its draft tokens}, written behind its known ones."""
        drafts = drafts or {}
        width = max(map(len, drafts.values()), default=0)
        places = [(row, offset) for row in rows for offset in range(len(drafts.get(row, ())) + 1)]
        for row in rows:
            known = [*self.tokens[row], *drafts.get(row, ())]
            self.ctx.token_ids[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
        padded = [[*drafts.get(row, ()), *[0] * (width - len(drafts.get(row, ())))] for row in rows]
        return Rows(
            req_idx=torch.tensor([row for row, _ in places]),
            offset=torch.tensor([offset for _, offset in places], dtype=torch.int32),
            position=torch.tensor([len(self.tokens[row]) + offset for row, offset in places]),
            seed=torch.zeros(len(places), dtype=torch.int64),
            drafts=torch.tensor(padded, dtype=torch.int64).view(len(rows), width),
            num_drafts=torch.tensor([len(drafts.get(row, ())) for row in rows], dtype=torch.int32),
            req_idx_np=np.array([row for row, _ in places], np.int32),
        )

    def apply(self, logits, rows=None, drafts=None):
        """Logits [L, V], or one row of them for all, after the stage."""
        step = self.step(list(rows or self.tokens), drafts)
        out = logits.expand(len(step.req_idx), -1).clone()
        self.stage.apply(out, step)
        return out

    def take(self, tokens, drafts=None):
        """Each row takes its list of tokens: {row: tokens}, of which all but the last were drafts."""
        step = self.step(list(tokens), drafts)
        width = step.drafts.shape[1] + 1
        sampled = torch.tensor([[*taken, *[0] * (width - len(taken))] for taken in tokens.values()])
        self.stage.commit(step, sampled, torch.tensor([len(t) for t in tokens.values()], dtype=torch.int32))
        for row, taken in tokens.items():
            self.tokens[row] += taken


@pytest.fixture(scope="session")
def driven():
    return Driven


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
        if target.spec.kind in ("mask", "elementwise"):
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
