"""Logprobs are those of the model's own logits, with true ranks, whatever the pipeline does."""

import numpy as np
import pytest
import torch

from framework import SamplingParams
from framework.errors import ConfigError, NotBuiltError
from framework.request import TokenLogprobs

LOGITS = torch.tensor([[1.0, 4.0, 2.0, 3.0, -1.0, float("-inf"), 0.5, 0.25]])


def columns(one, logits):
    result = one.sample(logits)
    return one.pipeline.collect(result)


@pytest.mark.parametrize("k", [0, 2, 5])
@pytest.mark.parametrize("params", [{"temperature": 0.5, "top_k": 2}, {"temperature": 0}, {"top_p": 0.3, "min_p": 0.1}])
def test_raw_logprobs_are_the_log_softmax_of_the_models_logits(bench, k, params):
    one = bench(vocab=8).add(SamplingParams(logprobs=k, **params))
    ids, found, _ = columns(one, LOGITS)
    exact = LOGITS[0].double().log_softmax(-1)
    np.testing.assert_allclose(found.sampled[0], exact[ids[0]], atol=1e-6)
    assert found.rank[0] == 1 + int((LOGITS[0] > LOGITS[0, ids[0]]).sum())
    assert found.top_ids.shape == (1, k) and found.top_ids.dtype == np.int32
    assert found.top_ids[0].tolist() == [1, 3, 2, 0, 6][:k]
    np.testing.assert_allclose(found.top_logprobs[0], exact[found.top_ids[0]], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rows_that_ask_are_computed_and_neighbours_change_no_bit(bench, dtype):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    asks = [SamplingParams(logprobs=2), SamplingParams(temperature=0), SamplingParams(logprobs=7, temperature=0.3)]
    one = bench(vocab=300).add(*asks, SamplingParams(temperature=0, logprobs=0))
    ids, found, _ = columns(one, logits)
    assert found.top_ids.shape == (4, 7)
    assert np.isnan(found.sampled[1]) and found.rank[1] == 0 and (found.top_ids[1] == -1).all()
    alone = one.sample(logits[:1], [1])
    _, single, _ = one.pipeline.collect(alone)
    assert single.sampled[0] == found.sampled[0]
    np.testing.assert_array_equal(single.top_ids[0], found.top_ids[0, :2])
    np.testing.assert_array_equal(single.top_logprobs[0], found.top_logprobs[0, :2])
    exact = logits.double().log_softmax(-1)
    for row in (0, 2, 3):
        np.testing.assert_allclose(found.sampled[row], exact[row, ids[row]], atol=2e-6)


def test_equal_logits_share_a_rank_and_stand_in_the_order_of_their_ids(bench):
    logits = torch.zeros(1, 200)
    logits[0, [150, 20]] = 3.0
    one = bench(vocab=200).add(SamplingParams(temperature=0, logprobs=4))
    ids, found, _ = columns(one, logits)
    assert ids.tolist() == [20] and found.rank.tolist() == [1]
    assert found.top_ids[0].tolist() == [20, 150, 0, 1]
    assert found.top_ranks[0].tolist() == [1, 1, 3, 3]


def test_logits_whose_logprobs_are_rounded_alike_keep_their_own_ranks(bench):
    logits = torch.full((1, 200), -40.0)
    logits[0, :3] = torch.tensor([100.0, 1e-9, 2e-9])
    logits[0, 3:5] = 50.0
    one = bench(vocab=200).add(SamplingParams(temperature=0, logprobs=6))
    _, found, _ = columns(one, logits)
    assert found.top_logprobs[0, 3] == found.top_logprobs[0, 4]
    assert found.top_ids[0].tolist() == [0, 3, 4, 2, 1, 5]
    assert found.top_ranks[0].tolist() == [1, 2, 2, 4, 5, 6]
    entries = TokenLogprobs()
    entries.append(0, 0.0, 1, found.top_ids[0], found.top_logprobs[0], found.top_ranks[0])
    assert {i: e.rank for i, e in entries[0].items()} == {0: 1, 3: 2, 4: 2, 2: 4, 1: 5, 5: 6}


def test_nobody_asks_nothing_is_computed(bench):
    one = bench(vocab=8).add(SamplingParams())
    assert columns(one, LOGITS)[1] is None


def test_minus_one_asks_for_the_whole_vocabulary(bench):
    one = bench(vocab=8).add(SamplingParams(logprobs=-1), SamplingParams(logprobs=2))
    assert columns(one, LOGITS.repeat(2, 1))[1].top_ids.shape == (2, 8)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_other_modes_are_refused_by_name_when_the_pipeline_is_built(bench, mode):
    with pytest.raises(NotBuiltError, match=f"logprobs_mode={mode} is not built yet"):
        bench(mode=mode)


def test_an_unknown_mode_names_the_nearest(bench):
    with pytest.raises(ConfigError, match="Did you mean 'raw_logprobs'"):
        bench(mode="raw_logprob")
