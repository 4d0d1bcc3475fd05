"""dry against the definition of its source, token by token, and by exact values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import SamplingParams
from framework.testing.stages import CHECKS, StageCase, context, make_rows, new_request
from framework_samplers.dry import MAX_MATCH, Dry
from framework_samplers.options import DryConfig

VOCAB = 12


def params(multiplier=1.0, **given):
    return SamplingParams(max_tokens=60, extra_args={"dry": {"multiplier": multiplier, **given}})


def applied(requests, texts, logits, *, options=(), encode=None):
    """Logits after the stage; one request and its tokens so far a row. Behind them stands what means nothing."""
    ctx = context(Dry.spec, logits.shape[1], len(requests) + 1, encode=encode)
    stage = Dry(DryConfig(list(options)), ctx)
    ctx.token_ids.fill_(3)
    for row, (one, text) in enumerate(zip(requests, texts, strict=True), start=1):
        stage.validate(one)
        if stage.wants(one):
            stage.add_request(row, one, new_request(row, one))
        ctx.token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    out = logits.clone()
    stage.apply(out, make_rows(range(1, len(requests) + 1), positions=[len(text) for text in texts]))
    return out


def lengths(text, span, breakers):
    """{token: length of the longest repetition that it would prolong}, as the source finds them."""
    text = text[-span:] if span else text
    found = {}
    for place in range(len(text) - 1):
        length = 0
        while length <= place and length < MAX_MATCH and text[place - length] == text[-1 - length]:
            if text[-1 - length] in breakers:
                break
            length += 1
        following = text[place + 1]
        if length and following not in breakers:
            found[following] = max(length, found.get(following, 0))
    return found


def expected(one, text, logits):
    given = {"base": 1.75, "allowed_length": 2, "range": 0, "sequence_breakers": ()} | dict(one.extra_args["dry"])
    out = logits.double().clone()
    for token, length in lengths(text, given["range"], set(given["sequence_breakers"])).items():
        if length >= given["allowed_length"]:
            out[token] -= given["multiplier"] * given["base"] ** (length - given["allowed_length"])
    return out


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    wanting = (params(allowed_length=1), params(2.5, base=1.0), params(0.8, allowed_length=1, sequence_breakers=[3, 5]))
    check(StageCase(Dry, wanting, (params(0), SamplingParams(temperature=0)), DryConfig([])))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3),
    st.integers(1, 4), st.integers(0, 20), st.lists(st.integers(0, 3), max_size=2), st.floats(1, 2),
)  # fmt: skip
def test_agrees_with_the_source(texts, allowed_length, span, breakers, base):
    one = params(0.7, allowed_length=allowed_length, range=span, sequence_breakers=breakers, base=base)
    logits = torch.randn(len(texts), VOCAB, generator=torch.Generator().manual_seed(0))
    ours = applied([one] * len(texts), texts, logits)
    for row, text in enumerate(texts):
        torch.testing.assert_close(ours[row].double(), expected(one, text, logits[row]), rtol=1e-5, atol=1e-5)


def test_penalises_what_prolongs_the_longest_repetition():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]  # behind 1 2 3 stood 4, behind 2 3 stood 5
    ours = applied([params(1.0, base=2.0)], [text], torch.zeros(1, VOCAB))
    assert ours[0].nonzero().squeeze(1).tolist() == [4, 5]
    assert ours[0, 4] == -2.0 and ours[0, 5] == -1.0


def test_no_repetition_reaches_over_a_sequence_breaker():
    text = [1, 2, 3, 4, 9, 1, 2, 3]
    short = applied([params(base=2.0, sequence_breakers=[2])], [text], torch.zeros(1, VOCAB))
    assert not short.any()
    spared = applied([params(sequence_breakers=[4])], [text], torch.zeros(1, VOCAB))
    assert not spared.any()


def test_breakers_of_the_deployment_serve_requests_that_name_none():
    text = [1, 2, 3, 4, 9, 1, 2, 3]
    by_id = applied([params(), params(sequence_breakers=[])], [text] * 2, torch.zeros(2, VOCAB), options=[4])
    assert by_id[0].count_nonzero() == 0 and by_id[1, 4] < 0
    by_text = applied([params()], [text], torch.zeros(1, VOCAB), options=["."], encode=lambda text: [7] * 2 + [4])
    assert not by_text.any()
    assert applied([params()], [text], torch.zeros(1, VOCAB), options=["."])[0, 4] < 0


def test_an_enormous_penalty_is_no_mask():
    ours = applied([params(1000, base=100, allowed_length=1)], [[1, 2] * 28 + [1]], torch.zeros(1, VOCAB))
    assert ours[0, 2] < -1e29 and ours.isfinite().all()


def test_rows_with_other_parameters_and_lengths_in_one_batch():
    texts = [[1, 2, 3, 1, 2], [5], [1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 1, 2]]
    requests = [params(), params(), params(0.5, range=3), params(0)]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    together = applied(requests, texts, logits)
    assert torch.equal(together[3], logits[3]) and torch.equal(together[1], logits[1])
    for row in range(4):
        alone = applied([requests[row]], [texts[row]], logits[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"multiplier": -1}, r"multiplier must be in \[0, 1000\], got -1"),
        ({"base": 0.5}, r"base must be in \[1, 100\], got 0\.5"),
        ({"allowed_length": 0}, r"allowed_length must be at least 1, got 0"),
        ({"range": 1.5}, r"range must be an integer, got 1\.5"),
        ({"sequence_breakers": [12]}, r"sequence_breakers\[0\] must be in 0\.\.11, got 12"),
        ({"sequence_breakers": ["."]}, r"sequence_breakers\[0\] must be an integer, got '\.'"),
        ({"sequence_breakers": list(range(65))}, r"sequence_breakers must have at most 64 ids, got 65"),
    ],
)
def test_parameters_outside_of_their_range_are_refused(given, message):
    with pytest.raises(ValueError, match=rf"extra_args\.dry\.{message}"):
        applied([params(**{"multiplier": 1.0} | given)], [[1]], torch.zeros(1, VOCAB))
