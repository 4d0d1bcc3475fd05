"""The pipeline runs each row through the stages that it wants, whatever stands beside it."""

import numpy as np
import pytest
import torch

from framework import SamplingParams
from framework.batch import Field
from framework.interfaces import Capabilities, StageSpec
from framework.testing.stages import make_rows, new_request

GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams()
MIXED = (
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(min_p=0.2, temperature=1.3),
    PLAIN,
    SamplingParams(temperature=2.0, top_k=20, top_p=0.5, min_p=0.01, logprobs=2),
)


def random_logits(rows, vocab=50, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


class Stage:
    """What the little stages of these tests share."""

    def __init__(self, options, ctx):
        self.ctx = ctx
        self.on = ctx.column("on")

    def wants(self, params):
        return bool((params.extra_args or {}).get(self.spec.name))

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        self.on.np[req_idx] = 1

    def commit(self, rows, sampled, num_valid):
        pass

    def rows_on(self, rows):
        return self.on.dev[rows.req_idx].bool().unsqueeze(1)


def spec(name, kind, *keeps, **more):
    caps = Capabilities(frozenset(more.pop("needs", ())), frozenset(keeps))
    return StageSpec(name, kind, (Field("on", "int32"),), caps=caps, extra_args=("on",), **more)


class EvenOnly(Stage):
    """Masks odd ids."""

    spec = spec("even_only", "mask", "kept_set")

    def apply(self, logits, rows):
        odd = torch.arange(logits.shape[1]) % 2 == 1
        logits.masked_fill_(odd & self.rows_on(rows), float("-inf"))


class NothingLeft(Stage):
    """Masks every id."""

    spec = spec("nothing_left", "mask", "kept_set")

    def apply(self, logits, rows):
        logits.masked_fill_(self.rows_on(rows), float("-inf"))


class Upside(Stage):
    """Turns the logits round, so it changes the best token."""

    spec = spec("upside", "elementwise")

    def apply(self, logits, rows):
        logits.mul_(torch.where(self.rows_on(rows), -1.0, 1.0))


class NotTheBest(Stage):
    """Lowers hi below the best token, as stages that exclude top choices do."""

    spec = spec("not_the_best", "threshold", "kept_set")

    def bounds(self, logits, rows, lo, hi):
        second = logits.topk(2).values[:, 1]
        return lo, torch.where(self.rows_on(rows).squeeze(1), torch.minimum(hi, second), hi)


class Watch(Stage):
    """Returns what it saw."""

    spec = spec("watch", "observe")

    def observe(self, raw, processed, rows, ids):
        return raw.clone(), processed.clone(), ids.clone()

    def collect(self, payload):
        return [t.numpy() for t in payload]


class CountTokens(Stage):
    """An elementwise stage whose only state changes in commit."""

    spec = spec("count_tokens", "elementwise", "argmax", "kept_set")

    def apply(self, logits, rows):
        pass

    def commit(self, rows, sampled, num_valid):
        self.on.dev[rows.req_idx] += num_valid


class Masked(Stage):
    """A faulty select stage: it always takes token 1."""

    spec = spec("masked", "select", "kept_set")

    def select(self, logits, rows, lo, hi):
        return torch.ones(len(logits), dtype=torch.int64)


def on(name, **more):
    return SamplingParams(extra_args={name: {"on": True}}, **more)


def test_stage_that_lets_masked_tokens_in_changes_nothing_about_them(bench):
    class Refill(Stage):
        """Gives every row the same logits, whatever was masked."""

        spec = spec("refill", "elementwise")

        def apply(self, logits, rows):
            logits.copy_(torch.where(self.rows_on(rows), torch.arange(logits.shape[1]).float(), logits))

    both = SamplingParams(temperature=0, extra_args={"even_only": {"on": True}, "refill": {"on": True}})
    table = bench("even_only", "refill", "gumbel", others={"even_only": EvenOnly, "refill": Refill})
    logits = random_logits(2)
    last_even = (logits.shape[1] - 1) // 2 * 2
    assert table.add(both, on("refill", temperature=0)).ids(logits) == [last_even, logits.shape[1] - 1]


def test_every_row_of_a_mixed_batch_gets_the_token_it_gets_alone(bench):
    together = bench().add(*MIXED)
    logits = random_logits(len(MIXED))
    ids = together.ids(logits)
    for place in range(len(MIXED)):
        assert together.ids(logits[place : place + 1], [place + 1]) == [ids[place]]


def test_permuted_rows_give_permuted_tokens(bench):
    one = bench().add(*MIXED)
    logits, order = random_logits(len(MIXED)), [4, 2, 6, 0, 3, 1, 5]
    ids = one.ids(logits)
    assert one.ids(logits[order], [i + 1 for i in order]) == [ids[i] for i in order]


def test_a_reused_row_serves_the_next_request_as_a_fresh_one(bench):
    logits, used, fresh = random_logits(1), bench().add(MIXED[-1]), bench().add(PLAIN)
    used.sample(logits)
    used.pipeline.add_request(1, PLAIN, new_request(1, PLAIN))
    assert used.ids(logits) == fresh.ids(logits)
    assert used.sample(logits).logprobs is None


@pytest.mark.parametrize("leaving", ["released", "overwritten"])
def test_pools_have_the_places_of_requests_that_left(bench, leaving):
    class Wide(Stage):
        """Takes a place in a pool."""

        spec = StageSpec("wide", "mask", (Field("on", "int32", pooled=True),), extra_args=("on",))

        def add_request(self, req_idx, params, request):
            self.on.take(req_idx)[:] = 1

        def apply(self, logits, rows):
            pass

    one = bench("wide", "gumbel", others={"wide": Wide}, num_rows=40)
    for row in range(1, 20):
        one.pipeline.add_request(row, on("wide"), new_request(row, on("wide")))
        if leaving == "released":
            one.pipeline.release(row)
        else:
            one.pipeline.add_request(row, PLAIN, new_request(row, PLAIN))
    assert len(one.pipeline.stages[0].ctx.column("on").dev) == 2


def test_stages_that_are_off_change_no_bit(bench):
    """min_p=0, top_k=V or -1 or 0 and top_p=1 equal a pipeline without the stages, beside rows that use them."""
    logits = random_logits(5)
    off = [SamplingParams(min_p=0.0), SamplingParams(top_k=50), SamplingParams(top_k=0), SamplingParams(top_p=1.0)]
    bare = bench("gumbel").add(*[PLAIN] * 5).ids(logits)
    assert bench().add(*off, MIXED[-1]).ids(logits)[:4] == bare[:4]


@pytest.mark.parametrize("off", [0, -1, 50, 51, 10_000])
def test_top_k_off_and_top_k_five_in_one_batch(bench, off):
    one = bench().add(SamplingParams(top_k=off), SamplingParams(top_k=5))
    row = torch.linspace(0, 0.5, 50)
    assert one.support(row, 0, 800) == set(range(50))
    assert one.support(row, 1) == set(range(45, 50))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0, top_p=0.9), SamplingParams(top_k=1),
                                    SamplingParams(top_k=1, temperature=5.0)])  # fmt: skip
def test_greedy_row_takes_the_lowest_of_equal_ids(bench, params):
    row = torch.tensor([[1.0, 1.0, 0.0]])
    assert bench(vocab=3).add(params).ids(row) == [0]
    assert bench(vocab=3).add(SamplingParams(temperature=1.0), params).ids(row.expand(2, -1))[1] == 0


def test_greedy_row_takes_no_position_in_a_reduced_list(bench):
    logits = torch.zeros(2, 50)
    logits[:, 37] = 9.0
    assert bench().add(SamplingParams(top_k=2), GREEDY).ids(logits)[1] == 37


def test_sampler_greedy_takes_the_best_token_of_every_row(bench):
    logits = random_logits(3)
    one = bench("greedy", name="greedy").add(PLAIN, GREEDY, SamplingParams(top_k=1))
    assert one.ids(logits) == logits.argmax(-1).tolist()


def test_greedy_rows_see_masks_and_what_may_change_the_best_token(bench):
    one = bench("even_only", "temperature", "gumbel", others={"even_only": EvenOnly}).add(
        on("even_only", temperature=0), GREEDY
    )
    assert one.ids(torch.arange(50.0).expand(2, -1)) == [48, 49]
    turned = bench("temperature", "upside", "gumbel", others={"upside": Upside}).add(
        on("upside", temperature=0), GREEDY
    )
    assert turned.ids(torch.arange(50.0).expand(2, -1)) == [0, 49]


def test_thresholds_of_others_narrow_the_interval_for_ours(bench):
    """With the best token excluded, top_k=2 keeps the second and the third."""
    one = bench("not_the_best", "top_k", "gumbel", others={"not_the_best": NotTheBest})
    one.add(on("not_the_best", top_k=2), SamplingParams(top_k=2))
    row = torch.linspace(0, 0.5, 50)
    assert one.support(row, 0) == {47, 48}
    assert one.support(row, 1) == {48, 49}


def test_a_row_in_bfloat16_draws_as_its_float32_values_do(bench):
    logits = random_logits(7).bfloat16()
    assert bench().add(*MIXED).ids(logits) == bench().add(*MIXED).ids(logits.float())


def test_stages_can_be_switched_off_by_a_request(bench):
    row = torch.linspace(0, 0.5, 50)
    one = bench(others={"even_only": EvenOnly}).add(SamplingParams(stages={"top_k": False}), SamplingParams(top_k=2))
    assert one.support(row, 0, 800) == set(range(50))
    cut = bench("even_only", "gumbel", others={"even_only": EvenOnly})
    cut.add(on("even_only"), SamplingParams(stages={"even_only": False}))
    assert any(i % 2 for i in cut.support(row, 1))
    assert not any(i % 2 for i in cut.support(row, 0))


def test_a_stage_under_another_key_gets_the_extra_args_of_that_key(bench):
    one = bench("even_only", "gumbel", others={"even_only": EvenOnly}, keys={"even_only": "pairs"}).add(on("pairs"))
    assert not any(i % 2 for i in one.support(torch.zeros(50), 0))


def test_row_emptied_by_masks_names_them_and_spares_its_neighbours(bench):
    others = {"even_only": EvenOnly, "nothing_left": NothingLeft}
    one = bench("even_only", "nothing_left", "temperature", "top_p", "gumbel", others=others)
    one.add(on("nothing_left"), GREEDY, on("nothing_left", temperature=0), SamplingParams(top_p=0.5))
    result = one.sample(random_logits(4))
    assert [token < 0 for token in result.told.tolist()] == [True, False, True, False]
    ids, _, errors = one.pipeline.collect(result)
    text = "no token is left to choose: stages nothing_left together mask the whole vocabulary"
    assert errors == {0: text, 2: text}
    assert [0 <= i < 50 for i in ids] == [False, True, False, True]
    assert all(0 <= i < 50 for i in result.ids)  # what the device embeds next, before the host knows


@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(top_k=3, top_p=0.9, min_p=0.1, temperature=0.3)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_numbers_are_reported(bench, params, value):
    one = bench().add(params, PLAIN, GREEDY)
    logits = random_logits(3)
    expected = one.ids(logits)[1:]
    if value == float("-inf"):
        logits[0] = value
    else:
        logits[0, 7] = value
    ids, _, errors = one.pipeline.collect(one.sample(logits))
    assert errors == {0: "the model's logits are not numbers"}
    assert ids[1:].tolist() == expected


def test_select_stage_that_takes_a_masked_token_is_named(bench):
    one = bench("even_only", "masked", others={"even_only": EvenOnly, "masked": Masked}).add(on("even_only"), PLAIN)
    _, _, errors = one.pipeline.collect(one.sample(random_logits(2)))
    assert errors == {0: "sampler stage 'masked' picked a token that is masked"}


def test_masked_token_in_a_mixed_batch_is_named(bench):
    one = bench("even_only", "masked", others={"even_only": EvenOnly, "masked": Masked})
    one.add(GREEDY, on("even_only"), PLAIN)
    _, _, errors = one.pipeline.collect(one.sample(random_logits(3)))
    assert errors == {1: "sampler stage 'masked' picked a token that is masked"}


@pytest.mark.parametrize("row", [{"temperature": 0}, {"temperature": 0.5}], ids=["greedy", "drawing"])
def test_observers_see_the_models_logits_where_all_rows_are_changed_in_place(bench, row):
    others = {"watch": Watch, "even_only": EvenOnly}
    one = bench("even_only", "temperature", "gumbel", "watch", others=others)
    one.add(*[SamplingParams(extra_args={"even_only": {"on": True}, "watch": {"on": True}}, **row)] * 2)
    logits = random_logits(2)
    raw, processed, _ = one.pipeline.collect_payloads(one.sample(logits))["watch"]
    np.testing.assert_array_equal(raw, logits.numpy())
    assert np.isfinite(processed).sum(-1).tolist() == [25, 25]


def test_observers_see_the_models_logits_and_the_processed_ones(bench):
    one = bench("temperature", "top_k", "gumbel", "watch", others={"watch": Watch})
    one.add(on("watch", temperature=0.5, top_k=2), GREEDY, PLAIN)
    logits = random_logits(3)
    result = one.sample(logits)
    raw, processed, ids = one.pipeline.collect_payloads(result)["watch"]
    np.testing.assert_array_equal(raw, logits.numpy())
    np.testing.assert_array_equal(ids, result.ids.numpy())
    kept = np.isfinite(processed).sum(-1).tolist()
    assert kept == [2, 50, 50]
    np.testing.assert_allclose(processed[0].max(), logits[0].max() * 2)
    np.testing.assert_array_equal(processed[1:], logits[1:].numpy())


def test_commit_reaches_the_stages_of_the_step_only(bench):
    one = bench("count_tokens", "gumbel", others={"count_tokens": CountTokens}).add(on("count_tokens"), PLAIN)
    column = one.pipeline.stages[0].ctx.column("on")
    rows = make_rows([2])
    one.pipeline.commit(rows, torch.tensor([[4]]), torch.tensor([5], dtype=torch.int32))
    assert column.np[:3].tolist() == [0, 1, 0]
    one.pipeline.commit(make_rows([1]), torch.tensor([[4]]), torch.tensor([5], dtype=torch.int32))
    assert column.np[:3].tolist() == [0, 6, 0]


@pytest.mark.parametrize("requests", [[GREEDY] * 3, [PLAIN] * 3])
def test_a_batch_of_one_sort_is_not_copied(bench, requests, monkeypatch):
    one, copies = bench().add(*requests), []
    real = torch.Tensor.index_select
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *a: copies.append(1) or real(*a))
    one.ids(random_logits(3))
    assert copies == []
    bench().add(GREEDY, PLAIN).ids(random_logits(2))
    assert copies


def test_padding_rows_are_harmless(bench):
    one = bench().add(PLAIN, SamplingParams(top_p=0.5))
    logits = random_logits(4)
    padded = one.ids(logits, [1, 2, 0, 0])
    assert padded[:2] == one.ids(logits[:2], [1, 2])


def test_seed_and_position_decide_a_draw(bench):
    one = bench().add(PLAIN)
    row = torch.zeros(1, 50)
    first = [one.ids(row, seeds=[5], positions=[p])[0] for p in range(30)]
    again = [one.ids(row, seeds=[5], positions=[p])[0] for p in range(30)]
    other = [one.ids(row, seeds=[6], positions=[p])[0] for p in range(30)]
    assert first == again
    assert first != other
