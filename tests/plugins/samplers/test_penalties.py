"""Stage `penalties`: repetition against transformers, the other two against four lines, state against tokens."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from framework import SamplingParams
from framework_samplers import penalties
from framework_samplers.penalties import Penalties

VOCAB = 12


@pytest.fixture(autouse=True, params=[0, 16], ids=["tokens", "vocabulary"])
def looked_at(request, monkeypatch):
    """Both ways: the tokens before a row alone, and, for histories as long as here, the whole vocabulary."""
    monkeypatch.setattr(penalties, "DENSE_FROM", request.param)


def reference(logits, prompt, outputs, params):
    """One row of logits after the three penalties, token by token in float32."""
    out, counts = logits.clone(), Counter(outputs)
    r, f, p = (torch.tensor(v) for v in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    for token in {*prompt, *outputs}:
        out[token] = out[token] / r if out[token] > 0 else out[token] * r
    for token, count in counts.items():
        out[token] -= f * count + p
    return out


def params(r=1.0, f=0.0, p=0.0):
    return SamplingParams(repetition_penalty=r, frequency_penalty=f, presence_penalty=p)


ids = st.integers(0, VOCAB - 1)
numbers = st.sampled_from([-2.0, -0.3, 0.0, 0.1, 0.5, 2.0])
factors = st.sampled_from([1e-300, 0.3, 0.9, 1.0, 1.1, 2.0, 10.0])
requests = st.tuples(
    st.builds(params, factors, numbers, numbers), st.lists(ids, min_size=1, max_size=5), st.lists(ids, max_size=6)
)


@settings(max_examples=80, deadline=None)
@given(st.lists(requests, min_size=1, max_size=5), st.data())
def test_processed_logits_are_those_of_the_reference_as_tokens_come(driven, batch, data):
    one, rows = driven(Penalties, VOCAB), torch.randn(1, VOCAB) * 3
    rows[0, 3], rows[0, 4], rows[0, 5] = 0.0, -0.0, -torch.inf
    outputs = {one.add(p, prompt, out): list(out) for p, prompt, out in batch}
    for _ in range(2):
        for got, row, (p, prompt, _) in zip(one.apply(rows), outputs, batch, strict=True):
            low = params(max(p.repetition_penalty, 1e-30), p.frequency_penalty, p.presence_penalty)
            assert torch.equal(got, reference(rows[0], prompt, outputs[row], low))
        tokens = {row: [data.draw(ids)] for row in outputs}
        one.take(tokens)
        for row, taken in tokens.items():
            outputs[row] += taken


def test_repetition_equals_that_of_transformers(driven, random_logits):
    logits, seen = random_logits(1, VOCAB), [5, 5, 7, 2]
    one = driven(Penalties, VOCAB)
    for r in (0.5, 1.3, 2.0):
        one.add(params(r), seen[:3], seen[3:])
    for got, r in zip(one.apply(logits), (0.5, 1.3, 2.0), strict=True):
        assert torch.equal(got, RepetitionPenaltyLogitsProcessor(r)(torch.tensor([seen]), logits.clone())[0])


def test_repetition_lowers_positive_and_negative_logits_and_leaves_zero(driven):
    one = driven(Penalties, 4)
    one.add(params(2.0), [0, 1, 2])
    assert one.apply(torch.tensor([[2.0, -1.0, 0.0, 3.0]])).tolist() == [[1.0, -2.0, 0.0, 3.0]]


class TestC4:
    """Prompt [5, 5, 7]: who touches what, and when, in any order of the rows."""

    def rows(self, driven):
        """(stage, {row: its name}): a row that asks for nothing stands first, as a reset row does."""
        one = driven(Penalties, VOCAB)
        one.tokens[1] = [5, 5, 7]
        for p in (params(r=2.0), params(f=0.5), params(p=0.5)):
            one.add(p, [5, 5, 7])
        return one

    def test_repetition_counts_the_prompt_and_the_others_the_output(self, driven):
        one, logits = self.rows(driven), torch.ones(1, VOCAB)
        plain, repeated = logits[0], logits[0].clone()
        repeated[[5, 7]] = 0.5
        assert torch.equal(one.apply(logits), torch.stack([plain, repeated, plain, plain]))
        one.take({row: [7] for row in (4, 2, 1, 3)})
        one.take({row: [7] for row in (3, 1, 2, 4)})
        once, twice = plain.clone(), plain.clone()
        once[7], twice[7] = 0.5, 0.0
        assert torch.equal(one.apply(logits), torch.stack([plain, repeated, twice, once]))

    def test_order_of_the_rows_permutes_the_results(self, driven):
        one, logits = self.rows(driven), torch.randn(1, VOCAB)
        one.take({row: [row] for row in (1, 2, 3, 4)})
        straight, shuffled = one.apply(logits), one.apply(logits, rows=(3, 1, 4, 2))
        assert torch.equal(straight[[2, 0, 3, 1]], shuffled)

    def test_rows_of_drafts_count_the_drafts_before_them(self, driven):
        one, logits = driven(Penalties, VOCAB), torch.zeros(1, VOCAB)
        one.add(params(f=0.5), [5, 5, 7], [3])
        one.add(params(p=0.5), [5, 5, 7], [3])
        got = one.apply(logits, drafts={1: [3, 4]})
        lost = [{3: 0.5}, {3: 1.0}, {3: 1.0, 4: 0.5}, {3: 0.5}]
        assert [{i: -v for i, v in enumerate(row.tolist()) if v} for row in got] == lost

    def test_only_drafts_that_were_taken_count_afterwards(self, driven):
        one, logits = driven(Penalties, VOCAB), torch.zeros(1, VOCAB)
        one.add(params(f=0.5), [5])
        one.add(params(f=0.5), [5])
        one.take({1: [3, 8], 2: [4]}, drafts={1: [3, 4], 2: [9]})
        got = [{i: -v for i, v in enumerate(row.tolist()) if v} for row in one.apply(logits)]
        assert got == [{3: 0.5, 8: 0.5}, {4: 0.5}]


def test_request_that_comes_back_has_the_counts_it_left_with(driven):
    one, logits = driven(Penalties, VOCAB), torch.randn(1, VOCAB)
    stayed = one.add(params(1.3, 0.5, 0.2), [5, 6])
    one.take({stayed: [2]})
    one.take({stayed: [2]})
    back = one.add(params(1.3, 0.5, 0.2), [5, 6], [2, 2])
    assert torch.equal(*one.apply(logits, rows=(stayed, back)))


def test_place_of_nobody_stays_neutral(driven):
    one = driven(Penalties, VOCAB)
    one.tokens[1] = [5]
    one.add(params(f=0.5), [5])
    one.take({1: [3], 2: [3]})
    assert not one.ctx.column("seen").dev[0].any()
