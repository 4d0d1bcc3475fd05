"""xtc cuts off all but the least likely of the tokens above a threshold, where its keyed draw says so."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from framework import LLM, SamplingParams
from framework.sampling.interval import inside, open_interval
from framework.testing.crafted import save_crafted
from framework.testing.stages import CHECKS, StageCase, context, make_rows, new_request
from framework_samplers.options import XtcConfig
from framework_samplers.xtc import Xtc


def params(threshold=0.1, probability=1.0):
    return SamplingParams(extra_args={"xtc": {"threshold": threshold, "probability": probability}})


def cut(requests, logits, interval=None, *, protected=(), eos=(), encode=None, **where):
    """Logits after the stage, -inf = dropped; one request a row."""
    ctx = context(Xtc.spec, logits.shape[1], len(requests) + 1, eos_token_ids=eos, encode=encode)
    stage = Xtc(XtcConfig(list(protected)), ctx)
    for row, one in enumerate(requests, start=1):
        stage.validate(one)
        stage.add_request(row, one, new_request(row, one))
    rows = make_rows(range(1, len(requests) + 1), **where)
    return inside(logits, *stage.bounds(logits, rows, *(interval or open_interval(len(logits), logits.device))))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    plain = (params(probability=0), SamplingParams(temperature=0))
    wanting = (params(0.01), params(0.0, 0.5), params(0.1, 0.9))
    check(StageCase(Xtc, wanting, plain, XtcConfig([299])))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=200), st.floats(0, 1))
def test_cuts_what_is_likelier_than_the_least_likely_above_the_threshold(values, threshold):
    logits = torch.tensor([values], dtype=torch.float32)
    probs = logits.double().softmax(-1)[0]
    above = probs[probs >= threshold]
    unclear = ((probs - threshold).abs() < 1e-6).any()
    expected = probs <= above.min() if len(above) else torch.ones_like(probs, dtype=torch.bool)
    kept = cut([params(threshold)], logits)[0].isfinite()
    assert bool(unclear) or torch.equal(kept, expected)
    assert kept.any()


def test_agrees_with_the_source_on_an_example():
    """Above 0.1 stand three tokens; the least likely of them stays, with all that are below the threshold."""
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.09, 0.06]]).log()
    assert cut([params()], logits).isfinite().tolist() == [[False, False, True, True, True]]


def test_a_threshold_above_one_half_never_cuts(random_logits):
    logits = random_logits(4, 300, scale=6.0)
    assert torch.equal(cut([params(0.51)] * 4, logits), logits)


def test_measures_inside_the_interval_only():
    logits = torch.tensor([[9.0, 1.0, 0.5, -5.0]])
    ours = cut([params()], logits, (torch.tensor([0.0]), torch.tensor([2.0])))
    assert ours.isfinite().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("token", [0, 1])
def test_a_row_that_would_lose_a_protected_token_is_left_alone(token):
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert torch.equal(cut([params()], logits, protected=[token]), logits)
    assert torch.equal(cut([params()], logits, eos=(token,)), logits)
    assert cut([params()], logits, protected=[2]).isfinite().tolist() == [[False, False, True]]


def test_texts_are_protected_by_the_token_that_completes_them():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert torch.equal(
        cut([params()], logits, protected=["\n"], encode=lambda text: [2] * (len(text) - 1) + [0]), logits
    )
    of_a_first_word = cut([params()], logits, protected=["\n"], encode=lambda text: [2] if text == "\n" else [2, 0])
    assert torch.equal(of_a_first_word, logits)
    without_tokenizer = cut([params()], logits, protected=["\n"])
    assert without_tokenizer.isfinite().tolist() == [[False, False, True]]


def test_is_drawn_with_the_given_probability_by_seed_and_position():
    count, probability = 4000, 0.3
    logits = torch.zeros(count, 3).copy_(torch.tensor([2.0, 1.0, 0.0]))
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    where = {"seeds": seeds, "positions": [7] * count}
    requests = [params(0.05, probability)] * count
    is_cut = ~cut(requests, logits, **where)[:, 0].isfinite()
    assert stats.binomtest(int(is_cut.sum()), count, probability).pvalue > 1e-4
    assert torch.equal(is_cut, ~cut(requests, logits, **where)[:, 0].isfinite())
    later = ~cut(requests, logits, seeds=seeds, positions=[8] * count)[:, 0].isfinite()
    both = [[int((is_cut & later).sum()), int((is_cut & ~later).sum())],
            [int((~is_cut & later).sum()), int((~is_cut & ~later).sum())]]  # fmt: skip
    assert stats.chi2_contingency(both).pvalue > 1e-4


def test_two_under_keys_of_their_own_are_drawn_independently(tmp_path):
    """Each leaves the third token alone at half the positions: together at a quarter of them all three are there."""
    probs = torch.tensor([0.5, 0.3, 0.2])
    folder = save_crafted(tmp_path / "model", probs.log().expand(3, 3).contiguous())
    words = ["engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=64", "+sampler/stage=xtc"]
    twice = ["sampler.stages.xtc.protected=[]", "+sampler.stages.again={name: xtc, order: 1041, protected: []}"]
    own = {"threshold": 0.1, "probability": 0.5}
    params = SamplingParams(max_tokens=60, seed=1, n=16, extra_args={"xtc": own, "again": own})
    with LLM(folder, overrides=[*words, *twice]) as llm:
        (output,) = llm.generate([[0]], params, use_tqdm=False)
    firsts = [token == 0 for one in output.outputs for token in one.token_ids]
    assert stats.binomtest(sum(firsts), len(firsts), 0.25 * 0.5).pvalue > 1e-3


@pytest.mark.parametrize(
    ("name", "value"), [("threshold", -0.1), ("threshold", 1.1), ("probability", 2), ("probability", "x")]
)
def test_parameters_outside_of_their_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"extra_args\.xtc\.{name} must be (in \[0, 1\]|a number), got"):
        cut([params(**{name: value})], torch.zeros(1, 4))


def test_options_that_are_no_tokens_are_refused():
    with pytest.raises(ValueError, match=r"protected\[0\] must be in 0\.\.299, got 300"):
        Xtc(XtcConfig([300]), context(Xtc.spec))
    with pytest.raises(ValueError, match=r"protected must be a list of texts or token ids, got 'eos'"):
        Xtc(XtcConfig("eos"), context(Xtc.spec))
