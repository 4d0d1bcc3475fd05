"""Greedy rows, ties and thresholds, from outside: what can be drawn, and how often."""

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted

LOGITS = [2.0, 1.0, 2.0, 1.0, 0.0, 1.0, -1.0, 0.0, -2.0, 0.5, -6.0, -6.0]
VOCAB, ROWS, DRAWS = len(LOGITS), 16, 75


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Every token is followed by LOGITS, so that the tokens of a request are independent draws."""
    folder = save_crafted(tmp_path_factory.mktemp("flat") / "m", torch.tensor([LOGITS] * VOCAB))
    words = ["engine.dtype=float32", f"scheduler.max_num_seqs={ROWS}"]
    with LLM(folder, overrides=words) as llm:
        yield llm


def draws(llm, count=ROWS, **params):
    each = [SamplingParams(seed=seed, max_tokens=DRAWS, **params) for seed in range(count)]
    return Counter(t for o in llm.generate([[0]] * count, each, use_tqdm=False) for t in o.outputs[0].token_ids)


def law(temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """{id: probability} in float64: temperature, min_p, top_k, top_p, each over what the ones before have kept."""
    kept = {i: x / temperature for i, x in enumerate(LOGITS)}
    if min_p:
        kept = {i: x for i, x in kept.items() if x >= max(kept.values()) + math.log(min_p)}
    if 0 < top_k < len(kept):
        bound = sorted(kept.values())[-top_k]
        kept = {i: x for i, x in kept.items() if x >= bound}
    total = sum(map(math.exp, kept.values()))
    larger = {i: sum(math.exp(y) for y in kept.values() if y > x) / total for i, x in kept.items()}
    kept = {i: x for i, x in kept.items() if larger[i] < top_p}
    total = sum(map(math.exp, kept.values()))
    return {i: math.exp(x) / total for i, x in kept.items()}


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 2},
    {"top_k": 3},  # the third best is one of three equal ones: five are kept
    {"top_k": 6},
    {"top_p": 0.3},
    {"top_p": 0.5},
    {"top_p": 1e-6},  # the two best are equal, and both stay
    {"top_p": 0.9},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"min_p": 0.05, "top_k": 5},
    {"top_k": 3, "top_p": 0.5},  # the mass is that of what top_k kept
    {"temperature": 2.0, "min_p": 0.5},  # min_p sees tempered logits
    {"temperature": 0.7, "min_p": 0.1, "top_k": 6, "top_p": 0.8},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_draws_follow_the_law_of_the_kept_tokens(flat, params):
    expected = law(**params)
    counts = draws(flat, **params)
    assert set(counts) <= set(expected)
    likely = [i for i, p in expected.items() if p * ROWS * DRAWS >= 5]
    assert set(likely) <= set(counts)
    if len(likely) > 1:
        rest = sum(counts[i] for i in expected if i not in likely)
        seen, wanted = [counts[i] for i in likely], [expected[i] * ROWS * DRAWS for i in likely]
        seen[-1], wanted[-1] = seen[-1] + rest, wanted[-1] + ROWS * DRAWS - sum(wanted)
        assert chisquare(seen, wanted).pvalue > 1e-4


GREEDY = [{"temperature": 0}, {"temperature": 9e-6}, {"top_k": 1}, {"temperature": 5.0, "top_k": 1},
          {"temperature": 0, "top_p": 0.9}, {"temperature": 0, "top_k": 5, "min_p": 0.5, "seed": 3}]  # fmt: skip


@pytest.mark.parametrize("params", GREEDY, ids=str)
def test_greedy_row_takes_the_lowest_of_the_best_ids_without_a_draw(flat, params):
    """CASES C5: alone, and beside rows that draw."""
    greedy = SamplingParams(max_tokens=20, **params)
    noisy = SamplingParams(max_tokens=20, temperature=1.0)
    alone = flat.generate([4], greedy)[0].outputs[0].token_ids
    beside = flat.generate([[4]] * 3, [noisy, greedy, noisy])[1].outputs[0].token_ids
    assert alone == beside == [0] * 20


def test_off_values_of_top_k_give_equal_tokens_beside_a_row_that_uses_it(flat):
    """CASES C2: 0, -1 and everything from the vocabulary's size on mean off."""
    off = [SamplingParams(seed=9, max_tokens=DRAWS, temperature=4.0, top_k=k) for k in (0, -1, VOCAB, VOCAB + 1, 10**9)]
    used = SamplingParams(seed=9, max_tokens=DRAWS, temperature=4.0, top_k=2)
    outputs = [o.outputs[0].token_ids for o in flat.generate([[0]] * 6, [*off, used])]
    assert all(tokens == outputs[0] for tokens in outputs[1:5])
    assert set(outputs[0]) == set(range(VOCAB))
    assert set(outputs[5]) == {0, 2}


def test_stage_that_is_switched_off_leaves_the_others_on(flat):
    assert set(draws(flat, count=1, top_k=2, stages={"top_p": False})) == {0, 2}
