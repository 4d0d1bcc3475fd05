"""The fused sampler against the stages in torch, through whole pipelines: greedy, drawn, mixed, each feature."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from framework import SamplingParams
from framework.batch import AllowedTokens, Rows
from framework.interfaces import Capabilities, StageSpec
from framework_backends.triton.sampler_ops import TritonSamplerOps

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def logits_of(count, vocab, dtype=torch.bfloat16, spread=2.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, vocab, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_rows_take_the_argmax_with_the_lowest_id_on_ties(pair, dtype):
    both = pair("greedy", vocab=1000).add(*[SamplingParams(temperature=0)] * 3)
    logits = logits_of(3, 1000, dtype)
    logits[0, [900, 130, 131]] = 30.0
    logits[1, [127, 128]] = 30.0
    plain, fused = both.both(logits)
    assert fused.ids.tolist()[:2] == [130, 127]
    assert torch.equal(fused.ids, plain.ids)
    assert torch.equal(fused.top, plain.top)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_rows_equal_the_reference(pair, dtype):
    both = pair(vocab=700).add(*[SamplingParams(temperature=t) for t in (1.0, 0.6, 1.7, 30.0)])
    for position in (5, 70):
        both.compare(logits_of(4, 700, dtype, seed=position), position=position)


@pytest.mark.parametrize("goes_on", [True, False], ids=["one launch", "two launches"])
def test_greedy_and_drawn_rows_share_a_launch(pair, goes_on):
    both = pair(goes_on=goes_on).add(
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_k=9)
    )
    plain, fused = both.compare(logits_of(4, 700))
    assert fused.ids[[0, 2]].tolist() == plain.ids[[0, 2]].tolist()


@pytest.mark.parametrize("vocab", [1, 128, 129, 4096])
def test_any_vocabulary_is_served(pair, vocab):
    both = pair(vocab=vocab).add(SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5))
    both.compare(logits_of(3, vocab))


THRESHOLDS = [
    {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.7},
    {"min_p": 0.01, "top_p": 0.8}, {"min_p": 0.02, "top_k": 30, "top_p": 0.95, "temperature": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("words", THRESHOLDS, ids=str)
def test_thresholds_keep_what_the_stages_keep(pair, words):
    both = pair().add(SamplingParams(**words), SamplingParams(), SamplingParams(temperature=0))
    both.compare(logits_of(3, 700), position=9)


IN_PLACE = [
    {"logit_bias": {3: 9.0, 500: -4.0, 699: 8.5}}, {"allowed_token_ids": [5, 6, 300, 699]},
    {"min_tokens": 9, "stop_token_ids": [11, 12]}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {2: 3.0}, "temperature": 0.8, "top_k": 20},
]  # fmt: skip


@pytest.mark.parametrize("words", IN_PLACE, ids=str)
def test_masks_bias_and_penalties_equal_the_stages(pair, words):
    greedy = {k: v for k, v in words.items() if k not in ("temperature", "top_k")} | {"temperature": 0}
    both = pair().add(SamplingParams(**words), SamplingParams(), SamplingParams(**greedy), outputs=[2, 9, 9, 650])
    logits = logits_of(3, 700)
    logits[:, [1, 2, 9, 650, 7, 11]] += 4
    plain, fused = both.compare(logits, position=7)
    assert torch.equal(fused.ids[2:], plain.ids[2:])
    assert torch.equal(fused.top[2:], plain.top[2:])


@pytest.mark.parametrize("rows", [[0, 2], None], ids=["some rows", "all rows"])
def test_grammars_masks_apply_to_their_rows(pair, rows):
    words = {"structured_outputs": {"regex": "a"}}
    asking = [SamplingParams(**words), SamplingParams(), SamplingParams(**words, temperature=0)]
    both = pair().add(*([asking[0]] * 3 if rows is None else asking))
    bits = torch.randint(-(2**31), 2**31, (3 if rows is None else 2, 22), generator=torch.Generator().manual_seed(4))
    bits = bits.to(torch.int32).to(both.device)
    index = None if rows is None else torch.tensor(rows, device=both.device)
    plain, fused = both.compare(logits_of(3, 700), allowed=AllowedTokens(index, bits))
    assert fused.ids[2] == plain.ids[2]


def test_a_row_without_a_token_is_told_and_its_neighbours_are_well(pair):
    both = pair().add(SamplingParams(allowed_token_ids=[4]), SamplingParams(), SamplingParams(temperature=0))
    logits = logits_of(3, 700)
    logits[0, 4] = -torch.inf
    plain, fused = both.compare(logits)
    assert fused.told.tolist()[0] == -1
    assert both.fused.pipeline.collect(fused)[2] == both.plain.pipeline.collect(plain)[2]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_that_is_not_numbers_is_told(pair, value):
    both = pair().add(SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5))
    logits = logits_of(3, 700)
    logits[0, 77] = logits[1, 650] = value
    if value == -torch.inf:
        logits[:2] = value
    _, fused = both.compare(logits)
    assert (fused.told < 0).tolist() == [True, True, False]


class _Own:
    """What stages of third parties have in common here."""

    spec: ClassVar[StageSpec]

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return not params.is_greedy

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        pass

    def commit(self, rows, sampled, num_valid):
        pass


class OddOnly(_Own):
    spec = StageSpec("odd_only", kind="mask", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def wants(self, params):
        return True

    def apply(self, logits, rows):
        logits[:, ::2] = -torch.inf


class Halve(_Own):
    spec = StageSpec("halve", kind="elementwise", caps=Capabilities(keeps=frozenset({"argmax", "kept_set"})))

    def apply(self, logits, rows):
        logits.mul_(torch.where(rows.req_idx == 3, 1.0, 0.5).unsqueeze(1))


class NotTheBest(_Own):
    spec = StageSpec("not_best", kind="threshold", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def bounds(self, logits, rows, lo, hi):
        second = logits.masked_fill(logits > hi.unsqueeze(1), -torch.inf).topk(2).values[:, 1]
        return lo, torch.where(rows.req_idx == 3, hi, torch.minimum(hi, second))


ORDERS = [
    ("odd_only", *(n for n in ("allowed_ids", "penalties", "temperature", "top_k", "gumbel"))),
    ("allowed_ids", "odd_only", "temperature", "top_p", "gumbel"),
    ("logit_bias", "temperature", "halve", "min_p", "top_k", "gumbel"),
    ("temperature", "not_best", "top_k", "top_p", "gumbel"),
    ("temperature", "top_k", "not_best", "top_p", "gumbel"),
]


@pytest.mark.parametrize("names", ORDERS, ids=lambda names: "-".join(names))
def test_stages_of_third_parties_run_between_the_fused_parts(pair, names):
    others = {"odd_only": OddOnly, "halve": Halve, "not_best": NotTheBest}
    both = pair(*names, others=others)
    words = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "logit_bias": {3: 2.0}}
    fields = {name for one in both.plain.pipeline.stages for name in one.spec.params}
    both.add(SamplingParams(**{k: v for k, v in words.items() if k in fields}), SamplingParams(seed=3))
    both.add(SamplingParams(temperature=0))
    both.compare(logits_of(3, 700, seed=8), position=8)


def test_logits_of_the_model_stay_as_they_are(pair):
    both = pair().add(SamplingParams(temperature=0.5, top_k=3, logit_bias={2: 3.0}), SamplingParams(top_p=0.9))
    logits = logits_of(2, 700, torch.float32)
    both.fused.table.apply()
    given = logits.clone().to(both.device)
    both.fused.pipeline.sample(given, both.logits_rows())
    assert torch.equal(given.cpu(), logits)


def test_a_row_alone_draws_what_it_draws_among_others(pair):
    words = [{"top_p": 0.9}, {"top_k": 7, "top_p": 0.6}, {"temperature": 0.0}, {"min_p": 0.1, "temperature": 1.4}]
    both = pair().add(*[SamplingParams(**one) for one in words])
    logits = logits_of(4, 700)
    together = both.fused.sample(logits.to(both.device), both.logits_rows())
    for place, row in enumerate(both.rows):
        alone = both.fused.sample(logits[place : place + 1].to(both.device), both.logits_rows([row]))
        for name in ("ids", "told", "top", "chosen"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[place : place + 1]), name


CHAINS = [
    [("scale", {"factor": 0.7})],
    [("scale", {"factor": 1.25}), ("top_k", {"k": 50})],
    [("min_p", {"log_min_p": -9.0}), ("top_p", {"top_p": 0.9})],
]


@pytest.mark.cuda
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(name for name, _ in chain))
def test_a_row_of_a_large_batch_draws_what_it_draws_alone(chain):
    # Large batches split their work otherwise; the interpreter has neither many rows nor threads that share a sum.
    device, count = torch.device("cuda"), 64
    logits = logits_of(count, 151936, torch.float32, spread=1.0) * torch.linspace(0.3, 6, count).unsqueeze(1)
    logits = logits.to(torch.bfloat16).to(device)

    def column(value):
        return torch.full((count,), value, device=device)

    links = [(name, {word: column(value) for word, value in operands.items()}) for name, operands in chain]
    links.append(("draw", {"draws": column(1)}))

    def drawn(first, last):
        where = torch.arange(first, last, device=device)
        none = torch.zeros(len(where), dtype=torch.int32, device=device)
        rows = Rows(where, none, where + 9, where * 7919, where.view(-1, 1)[:, :0], none, where.int().cpu().numpy())
        return ops.sample(logits[first:last], rows, links, None)

    ops = TritonSamplerOps()
    together = drawn(0, count)
    for place in range(0, count, 9):
        alone = drawn(place, place + 1)
        for name in ("ids", "told", "top", "value", "log_sum"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[place : place + 1]), (place, name)


@pytest.mark.cuda
def test_draws_follow_the_softmax():
    # Only where draws are cheap: elsewhere they are compared with the reference, whose law has tests of its own.
    device, count = torch.device("cuda"), 8192
    logits = logits_of(1, 500, torch.float32, spread=1.2).to(device)
    rows = Rows(
        req_idx=torch.zeros(count, dtype=torch.int64, device=device),
        offset=torch.zeros(count, dtype=torch.int32, device=device),
        position=torch.arange(count, device=device),
        seed=torch.arange(count, device=device) * 7919,
        drafts=torch.zeros(count, 0, dtype=torch.int64, device=device),
        num_drafts=torch.zeros(count, dtype=torch.int32, device=device),
        req_idx_np=np.zeros(count, np.int32),
    )
    column = torch.ones(2, dtype=torch.int32, device=device)
    counts = torch.zeros(500, device=device)
    ops = TritonSamplerOps()
    for round in range(16):
        rows.position += 3 * round + count
        ids = ops.sample(logits.expand(count, -1).contiguous(), rows, [("draw", {"draws": column})], None).ids
        counts += torch.bincount(ids, minlength=500)
    expected = logits[0].double().softmax(-1) * counts.sum()
    is_common = expected > 5
    distance = ((counts - expected) ** 2 / expected)[is_common].sum()
    freedom = int(is_common.sum()) - 1
    assert abs(distance - freedom) < 4 * (2 * freedom) ** 0.5  # chi-square of many degrees is normal
