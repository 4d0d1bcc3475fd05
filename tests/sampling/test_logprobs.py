"""Logprobs of the model's own and of the processed logits: exact values, true ranks, and whose they are."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from framework import SamplingParams
from framework.errors import ConfigError
from framework.interfaces import Capabilities, FusedLogprobs, StageSpec
from framework.request import TokenLogprobs
from framework.sampling.logprobs import FEW_IDS, measure, num_larger_each, to_host

LOGITS = torch.tensor([[1.0, 4.0, 2.0, 3.0, -1.0, float("-inf"), 0.5, 0.25]])
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
STAGES = ("no_three", "temperature", "min_p", "top_k", "top_p", "gumbel")


class NoThree:
    """A mask as a grammar sets it: id 3 is forbidden to requests that say so."""

    spec = StageSpec("no_three", "mask", caps=Capabilities(keeps=frozenset({"kept_set"})), extra_args=("on",))

    def __init__(self, options, ctx):
        self._on = np.zeros(ctx.num_rows, bool)

    def wants(self, params):
        return bool((params.extra_args or {}).get("no_three"))

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        self._on[req_idx] = True

    def apply(self, logits, rows):
        # rows that want it keep their mark: the tests give each request a row of its own
        logits[self._on[rows.req_idx_np].nonzero()[0], 3] = -torch.inf

    def commit(self, rows, sampled, num_valid):
        pass


MASKED = {"no_three": {"on": True}}


def columns(one, logits, rows=None):
    result = one.sample(logits, rows)
    return one.pipeline.collect(result)


class NearTieError(Exception):
    """Two roundings of one number may fall on different sides of a threshold."""


def told(logits, params, mode):
    """[V] float64 what `mode` tells of a row, by sorting and cumulating. The logits' products must be exact."""
    row = logits.double().numpy().copy()
    if mode.startswith("processed"):
        row[3] = -np.inf if params.extra_args else row[3]
        if not params.is_greedy:
            row /= params.temperature
            for floor in (min_p_floor, top_k_floor, top_p_floor):
                row[row < floor(row, params)] = -np.inf
    return row if mode.endswith("logits") else row - row.max() - np.log(np.exp(row - row.max()).sum())


def min_p_floor(row, params):
    if params.min_p == 0:
        return -np.inf
    low = row.max() + math.log(params.min_p)
    if abs(row - low).min() < 1e-4:
        raise NearTieError
    return low


def top_k_floor(row, params):
    return np.sort(row)[-params.top_k] if params.top_k > 0 else -np.inf


def top_p_floor(row, params):
    falling = np.sort(row)[::-1]
    mass = np.exp(falling - falling[0])
    before = (np.cumsum(mass) - mass) / mass.sum()
    if params.top_p == 1:
        return -np.inf
    if abs(before - params.top_p).min() < 1e-5:
        raise NearTieError
    return falling[before < params.top_p].min()


def check_row(found, row, token, params, exact):
    """Every number of one logits row against [V] exact ones; `found` holds float32."""
    close = {"rtol": 1e-5, "atol": 2e-5}
    np.testing.assert_allclose(found.sampled[row], exact[token], **close)
    assert found.rank[row] == 1 + (exact > exact[token]).sum()
    k = len(exact) if params.logprobs == -1 else params.logprobs or 0
    order = np.lexsort((np.arange(len(exact)), -exact))[:k]
    ids, values, ranks = found.beside(row, k)
    assert ids[:k].tolist() == order.tolist()
    listed = sorted(set(params.logprob_token_ids or ()))
    assert ids[k:].tolist() == listed
    np.testing.assert_allclose(values, exact[ids], **close)
    assert ranks.tolist() == [1 + (exact > exact[i]).sum() for i in ids]
    assert (ids.dtype, values.dtype, ranks.dtype) == (np.int32, np.float32, np.int32)


# ----------------------------------------------------------------------------------------------------------- the modes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 2, 5])
@pytest.mark.parametrize("mode", MODES)
def test_case_c7_temperature_top_k_and_mask_in_every_mode(bench, mode, k, dtype):
    """CASES C7: T=0.5, top_k=2 and a mask over known logits."""
    params = SamplingParams(logprobs=k, temperature=0.5, top_k=2, seed=1, extra_args=MASKED)
    one = bench(*STAGES, vocab=8, mode=mode, others={"no_three": NoThree}).add(params)
    ids, found, _ = columns(one, LOGITS.to(dtype))
    raw, kept = LOGITS[0].double(), torch.full((8,), -torch.inf, dtype=torch.float64)
    kept[[1, 2]] = torch.tensor([8.0, 4.0], dtype=torch.float64)  # 4 / 0.5 and 2 / 0.5: 3 is masked
    exact = raw if mode.startswith("raw") else kept
    exact = (exact if mode.endswith("logits") else exact.log_softmax(-1)).numpy()
    check_row(found, 0, ids[0], params, exact)
    assert found.top_ids.shape == (1, k)
    if mode == "processed_logprobs" and k:
        assert np.exp(found.top_logprobs[0].astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)
        assert found.top_logprobs[0, 2:].tolist() == [-math.inf] * max(k - 2, 0)
        assert found.top_ranks[0].tolist() == [1, 2, 3, 3, 3][:k]


ROWS = st.builds(
    dict,
    temperature=st.sampled_from([0, 0.25, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 1, 2, 7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.03, 0.3]),
    logprobs=st.sampled_from([None, 0, 1, 4, -1]),
    logprob_token_ids=st.sampled_from([None, [3], [5, 0, 5], list(range(FEW_IDS + 6))]),
    extra_args=st.sampled_from([None, MASKED]),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(MODES),
    rows=st.lists(ROWS, min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    as_bfloat16=st.booleans(),
)
def test_every_row_of_a_mixed_batch_has_its_own_numbers(bench, mode, rows, seed, as_bfloat16):
    each = [SamplingParams(seed=seed, **row) for row in rows]
    vocab = 150
    # quarters: equal in bfloat16, with ties and gaps well above rounding
    quarters = torch.randint(-12, 13, (len(rows), vocab), generator=torch.Generator().manual_seed(seed)) / 4
    logits = quarters.to(torch.bfloat16 if as_bfloat16 else torch.float32)
    try:
        exact = [told(row, p, mode) for row, p in zip(quarters, each, strict=True)]
    except NearTieError:
        assume(False)
    one = bench(*STAGES, vocab=vocab, mode=mode, others={"no_three": NoThree}).add(*each)
    ids, found, faults = columns(one, logits)
    assert not faults
    if not any(p.asks_logprobs for p in each):
        assert found is None
        return
    for row, params in enumerate(each):
        if params.asks_logprobs:
            check_row(found, row, ids[row], params, exact[row])
            assert exact[row][ids[row]] > -math.inf
        else:
            assert np.isnan(found.sampled[row]) and found.rank[row] == 0 and (found.top_ids[row] == -1).all()
            assert row not in found.listed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rows_that_ask_are_computed_and_neighbours_change_no_bit(bench, dtype, mode):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    asks = [SamplingParams(logprobs=2, logprob_token_ids=[9]), SamplingParams(temperature=0),
            SamplingParams(logprobs=7, temperature=0.3, top_p=0.8)]  # fmt: skip
    one = bench(vocab=300, mode=mode).add(*asks, SamplingParams(temperature=0, logprobs=0))
    _, found, _ = columns(one, logits)
    assert found.top_ids.shape == (4, 7)
    assert np.isnan(found.sampled[1]) and found.rank[1] == 0 and (found.top_ids[1] == -1).all()
    _, single, _ = columns(one, logits[:1], [1])
    assert single.sampled[0] == found.sampled[0]
    for alone, beside in zip(single.beside(0, 2), found.beside(0, 2), strict=True):
        np.testing.assert_array_equal(alone, beside)
    _, single, _ = columns(one, logits[2:3], [3])
    assert single.sampled[0] == found.sampled[2]
    np.testing.assert_array_equal(single.top_logprobs[0], found.top_logprobs[2])


@pytest.mark.parametrize("mode", MODES)
def test_asking_changes_no_token(bench, mode):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    plain = [SamplingParams(seed=4, **shape) for shape in ({}, {"top_k": 9, "temperature": 2.0}, {"temperature": 0})]
    asking = [p.replace(logprobs=3, logprob_token_ids=[1]) for p in plain]
    assert bench(vocab=300).add(*plain).ids(logits) == bench(vocab=300, mode=mode).add(*asking).ids(logits)


def test_greedy_row_tells_its_processed_distribution_at_temperature_one(bench):
    params = SamplingParams(temperature=0, top_p=0.1, min_p=0.9, logprobs=-1, extra_args=MASKED)
    one = bench(*STAGES, vocab=8, mode="processed_logprobs", others={"no_three": NoThree}).add(params)
    _, found, _ = columns(one, LOGITS)
    masked = LOGITS[0].double().index_fill(0, torch.tensor([3]), -torch.inf)
    np.testing.assert_allclose(found.top_logprobs[0], masked.log_softmax(-1)[found.top_ids[0]], atol=1e-6)


def test_greedy_pipeline_tells_what_its_masks_leave(bench):
    params = SamplingParams(logprobs=2, extra_args=MASKED)
    one = bench("no_three", "greedy", name="greedy", vocab=8, mode="processed_logits", others={"no_three": NoThree})
    _, found, _ = columns(one.add(params), LOGITS)
    assert found.top_ids[0].tolist() == [1, 2] and found.top_logprobs[0].tolist() == [4.0, 2.0]


def test_lowered_upper_bound_masks_the_best_tokens(bench):
    class NotTheBest(NoThree):
        """Lowers hi below the best token, as stages that exclude top choices do."""

        spec = StageSpec("no_three", "threshold", caps=Capabilities(keeps=frozenset({"kept_set"})), extra_args=("on",))

        def bounds(self, logits, rows, lo, hi):
            return lo, torch.minimum(hi, logits.topk(2).values[:, 1])

    params = SamplingParams(logprobs=3, extra_args=MASKED)
    one = bench("temperature", "no_three", "gumbel", vocab=8, mode="processed_logits", others={"no_three": NotTheBest})
    _, found, _ = columns(one.add(params), LOGITS)
    assert found.top_ids[0].tolist() == [3, 2, 0] and found.top_logprobs[0].tolist() == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_observers_see_both_kinds_of_logits_in_every_mode(bench, mode):
    class Watch(NoThree):
        """Returns what it saw."""

        spec = StageSpec("watch", "observe", extra_args=("on",))

        def wants(self, params):
            return True

        def observe(self, raw, processed, rows, ids):
            return raw.clone(), processed.clone()

        def collect(self, payload):
            return payload

    each = [SamplingParams(temperature=0.5, top_k=2, seed=1, logprobs=1), SamplingParams(temperature=0, logprobs=1)]
    one = bench("temperature", "top_k", "gumbel", "watch", vocab=8, mode=mode, others={"watch": Watch}).add(*each)
    raw, processed = one.sample(LOGITS.repeat(2, 1)).payloads["watch"]
    kept = torch.full((8,), -torch.inf).index_copy(0, torch.tensor([1, 3]), torch.tensor([8.0, 6.0]))
    assert torch.equal(raw, LOGITS.repeat(2, 1))
    assert torch.equal(processed, torch.stack([kept, LOGITS[0]]))


# --------------------------------------------------------------------------------------------------- ranks, listed ids


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
    entries.extend([0], found, 0, 6)
    assert {i: e.rank for i, e in entries[0].items()} == {0: 1, 3: 2, 4: 2, 2: 4, 1: 5, 5: 6}


@pytest.mark.parametrize("count", [1, FEW_IDS, FEW_IDS + 1, 500])
def test_ranks_of_any_number_of_ids_are_counted(count):
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(0, 40, (3, 500), generator=generator).float()
    logits[0, 7] = -torch.inf
    values = logits.gather(1, torch.randint(0, 500, (3, count), generator=generator))
    expected = (logits.unsqueeze(1) > values.unsqueeze(2)).sum(-1)
    assert torch.equal(num_larger_each(logits, values), expected.int())


def test_row_that_lists_ids_asks_even_without_logprobs_and_a_reused_row_keeps_no_list(bench):
    one = bench(vocab=8).add(SamplingParams(logprob_token_ids=[6, 2]), SamplingParams(logprobs=1))
    _, found, _ = columns(one, LOGITS.repeat(2, 1))
    assert list(found.listed) == [0] and found.beside(0, 0)[0].tolist() == [2, 6]
    assert found.beside(1, 1)[0].tolist() == [1]
    again = SamplingParams(logprobs=0)
    one.pipeline.add_request(1, again, None)
    assert not columns(one, LOGITS, [1])[1].listed


def test_rows_without_a_list_are_measured_by_the_backend_whoever_else_lists_ids(bench):
    class Ops:
        """Measures in a way of its own: it says 7 of everything."""

        fuses, compiles = (), False

        def logprobs(self, logits, ids, k, *, is_log):
            sevens = torch.full((len(ids), k), 7)
            return FusedLogprobs(sevens[:, 0].float(), sevens[:, 0], sevens, sevens.float(), sevens)

    one = bench(ops=Ops()).add(SamplingParams(logprobs=1), SamplingParams(logprob_token_ids=[4]))
    logits = torch.zeros(2, 50)
    assert columns(one, logits)[1].top_ids[0].tolist() == [0]
    assert columns(one, logits[:1], rows=[1])[1].top_ids[0].tolist() == [7]


def test_empty_list_of_ids_asks_for_nothing(bench):
    assert columns(bench(vocab=8).add(SamplingParams(logprob_token_ids=[])), LOGITS)[1] is None


def test_nobody_asks_nothing_is_computed(bench):
    one = bench(vocab=8).add(SamplingParams())
    assert columns(one, LOGITS)[1] is None


def test_logits_far_from_zero_keep_their_logprobs(bench):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5)) * 2 + 10_000
    told = columns(bench().add(SamplingParams(logprobs=3, logprob_token_ids=[7])), logits)[1]
    expected = logits.double().log_softmax(-1)[0]
    np.testing.assert_allclose(told.top_logprobs[0], expected[told.top_ids[0]], atol=1e-6)
    np.testing.assert_allclose(told.listed[0][1], expected[[7]], atol=1e-6)


def test_minus_one_asks_for_the_whole_vocabulary(bench):
    one = bench(vocab=8).add(SamplingParams(logprobs=-1), SamplingParams(logprobs=2))
    assert columns(one, LOGITS.repeat(2, 1))[1].top_ids.shape == (2, 8)


def test_an_unknown_mode_names_the_nearest(bench):
    with pytest.raises(ConfigError, match="Did you mean 'raw_logprobs'"):
        bench(mode="raw_logprob")


@pytest.mark.parametrize("num_rows", [3, 4], ids=["of all rows", "of some"])
def test_columns_stay_when_the_memory_of_the_step_is_written_again(num_rows):
    measured = measure(torch.randn(3, 9), torch.tensor([1, 5, 7]), 2, is_log=True)
    (best,) = measured.best
    expected = [t.tolist() for t in (measured.sampled, measured.rank, best.ids, best.logprobs, best.ranks)]
    found = to_host(measured, num_rows)
    for tensor in (measured.sampled, measured.rank, best.ids, best.logprobs, best.ranks):
        tensor.zero_()
    told = found.sampled, found.rank, found.top_ids, found.top_logprobs, found.top_ranks
    assert [array[:3].tolist() for array in told] == expected
    assert [array.dtype for array in told] == [np.float32, np.int32, np.int32, np.float32, np.int32]
    assert all(len(array) == num_rows for array in told)


@pytest.mark.parametrize("rows", [[0, 1], [0, 2], [2], []])
def test_numbers_of_some_rows_are_their_own(rows):
    measured = measure(torch.randn(4, 9), torch.tensor([1, 5, 7, 0]), 3, is_log=True)
    some = measured.at(np.array(rows, np.int64), 2)
    (all_best,), (best,) = measured.best, some.best
    assert torch.equal(some.sampled, measured.sampled[rows]) and torch.equal(some.rank, measured.rank[rows])
    for one, whole in ((best.ids, all_best.ids), (best.logprobs, all_best.logprobs), (best.ranks, all_best.ranks)):
        assert torch.equal(one, whole[rows, :2])
