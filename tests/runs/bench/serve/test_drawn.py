"""Arrivals, lengths and prompts of a load follow their laws, and are the same for every rate and server."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from framework.errors import ConfigError
from framework.runs.bench.serve.arrivals import moments, unit_gaps
from framework.runs.bench.serve.lengths import SHAREGPT_INPUT, SHAREGPT_OUTPUT, draw_lengths
from framework.runs.bench.serve.options import LoadOptions
from framework.runs.bench.serve.prompts import Prompts

MANY = 20_000


@pytest.mark.parametrize(
    ("arrivals", "burstiness", "variance"),
    [("poisson", 0.5, 1.0), ("burst", 0.25, 4.0), ("burst", 4.0, 0.25), ("constant", 0.5, 0.0)],
)
def test_gaps_have_mean_one_and_the_variance_of_their_law(arrivals, burstiness, variance):
    gaps = unit_gaps(arrivals, burstiness, MANY, seed=3)[1:]
    # Errors of mean and variance over 20,000 draws; four and a half of them, with the fourth moment of gamma gaps.
    error = np.sqrt(variance / MANY)
    assert abs(gaps.mean() - 1) <= 4.5 * error
    assert abs(gaps.var() - variance) <= 4.5 * error * np.sqrt(2 * variance + 6 * variance**2)


def test_gaps_of_a_poisson_process_are_exponential():
    gaps = unit_gaps("poisson", 1.0, MANY, seed=1)[1:]
    for limit in (0.1, 0.7, 1.0, 2.0, 4.0):
        share = np.exp(-limit)
        assert abs((gaps > limit).mean() - share) <= 4.5 * np.sqrt(share * (1 - share) / MANY)


def test_moments_of_a_rate_are_those_of_another_one_stretched():
    gaps = unit_gaps("poisson", 1.0, 50, seed=0)
    slow, fast = moments(gaps, 2.0), moments(gaps, 8.0)
    assert slow == pytest.approx([4 * one for one in fast]) and slow[0] == 0.0
    assert slow == sorted(slow) and moments(gaps, None) == [0.0] * 50


def test_lengths_of_sharegpt_have_the_published_median_and_quantile():
    inputs, outputs = draw_lengths(LoadOptions(lengths="sharegpt", num_prompts=MANY, max_total=10**7))
    for lengths, law in ((inputs, SHAREGPT_INPUT), (outputs, SHAREGPT_OUTPUT)):
        # The error of a sample quantile is below 2 % here: lengths are wide, but 20,000 of them are many.
        assert np.median(lengths) == pytest.approx(law.median, rel=0.05)
        assert np.percentile(lengths, 90) == pytest.approx(law.p90, rel=0.06)


def test_sharegpt_leaves_out_what_is_too_long_and_piles_nothing_up_at_the_limit():
    inputs, outputs = draw_lengths(LoadOptions(lengths="sharegpt", num_prompts=MANY, max_total=2000))
    totals = [sum(pair) for pair in zip(inputs, outputs, strict=True)]
    assert len(totals) == MANY and max(totals) <= 2000 and min(*inputs, *outputs) >= 1
    assert Counter(totals)[2000] < 100


def test_sharegpt_is_scaled():
    options = LoadOptions(lengths="sharegpt", num_prompts=1000, max_total=10**7)
    whole, tenth = draw_lengths(options)[0], draw_lengths(replace(options, scale=0.1))[0]
    assert tenth == pytest.approx([one / 10 for one in whole], abs=1)


def test_sharegpt_without_room_is_refused():
    with pytest.raises(ConfigError, match=r"bench.max_total=2 leaves out nearly every request"):
        draw_lengths(LoadOptions(lengths="sharegpt", max_total=2))


def test_uniform_lengths_reach_both_ends_evenly():
    options = LoadOptions(lengths="uniform", input_len_min=3, input_len=7, output_len=2, num_prompts=5000)
    inputs, outputs = draw_lengths(options)
    counts = Counter(inputs)
    assert set(counts) == {3, 4, 5, 6, 7} and set(outputs) == {1, 2}
    assert all(abs(count - 1000) < 150 for count in counts.values())  # five standard deviations


def test_same_seed_and_salt_give_the_same_requests_and_another_seed_does_not():
    options = LoadOptions(lengths="uniform", input_len=40, num_prompts=20)
    assert Prompts(options, 5).asks(1) == Prompts(options, 5).asks(1)
    assert Prompts(options, 5).asks(1) != Prompts(replace(options, seed=1), 5).asks(1)


def test_more_requests_begin_with_those_of_fewer():
    few, more = (Prompts(LoadOptions(num_prompts=count), 0).asks(0) for count in (4, 9))
    assert few == more[:4]


@pytest.mark.parametrize("shared", [0, 24])
def test_passes_differ_in_their_first_tokens_alone(shared):
    prompts = Prompts(LoadOptions(num_prompts=30, shared_prefix_len=shared, num_shared_prefixes=3), salt=1)
    one, two = prompts.asks(1), prompts.asks(2)
    assert [ask.token_ids[2:] for ask in one] == [ask.token_ids[2:] for ask in two]
    assert not {ask.token_ids[:2] for ask in one} & {ask.token_ids[:2] for ask in two}
    assert [ask.text for ask in one] != [ask.text for ask in two]


def test_prompts_without_a_shared_prefix_have_no_equal_beginnings():
    asks = Prompts(LoadOptions(num_prompts=200), salt=1).asks(1)
    assert len({ask.token_ids[:2] for ask in asks}) == 200
    assert all(1000 <= token < 8000 for ask in asks for token in ask.token_ids)


def test_shared_prefixes_are_equal_in_their_group_and_nothing_beyond():
    options = LoadOptions(num_prompts=12, input_len=10, shared_prefix_len=24, num_shared_prefixes=3)
    asks = Prompts(options, salt=1).asks(4)
    assert {len(ask.token_ids) for ask in asks} == {34}
    assert len({ask.token_ids[:24] for ask in asks}) == 3
    assert Counter(ask.token_ids[:24] for ask in asks).most_common()[0][1] == 4
    assert len({ask.token_ids[24:26] for ask in asks}) == 12


def test_text_has_a_word_for_each_token():
    ask = Prompts(LoadOptions(num_prompts=1, input_len=50), salt=0).asks(0)[0]
    assert len(ask.text.split()) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1, "concurrency": 2}, "exclude each other"),
        ({"rate": 0}, r"bench.rate=0 must be a number above 0"),
        ({"rate": [1, True]}, r"bench.rate=True must be"),
        ({"rate": "fast"}, r"bench.rate=fast must be a number above 0, or saturation"),
        ({"rate": []}, r"bench.rate=\[\] holds no number"),
        ({"rate": [2, 2]}, "holds a number twice"),
        ({"concurrency": 1.5}, "bench.concurrency=1.5 must be a whole number"),
        ({"concurrency": 0}, "bench.concurrency=0 is too small"),
        ({"arrivals": "burst"}, "bench.arrivals=burst needs a rate"),
        ({"arrivals": "poison", "rate": 1}, "Did you mean 'poisson'"),
        ({"api": "responses"}, "bench.api=responses: there is no such choice"),
        ({"prompts": "ids", "api": "chat"}, "a chat is text"),
        ({"sampling": {"max_tokens": 3}}, "bench.sampling.max_tokens is set by the workload"),
        ({"slo": {"ttft": 3}}, "Did you mean 'ttft_ms'"),
        ({"slo": {"ttft_ms": -1}}, "bench.slo.ttft_ms=-1 must be a number above 0"),
        ({"url": "localhost:8000"}, "must begin with http:// or https://"),
        ({"model": "x"}, "bench.model=x speaks of another server"),
        ({"token_ids": [5, 5]}, "must be \\[low, high\\]"),
        ({"lengths": "uniform", "input_len": 3, "input_len_min": 4}, "bench.input_len_min=4 is above"),
        ({"max_s": 0}, "bench.max_s=0 must be a number above 0"),
    ],
)
def test_options_that_make_no_load_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**options)
