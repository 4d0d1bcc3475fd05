"""The host's fused sampler against the stages in torch, through whole pipelines over a real table: the very same."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from framework import SamplingParams, step_ops
from framework.batch import NewRequest, Rows
from framework.config import SamplerConfig, StageConfig
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.plugins import ComponentSpec
from framework.rng import row_keys, row_keys_np
from framework.sampling.interval import open_interval
from framework.sampling.logprobs import measure, to_host
from framework.sampling.pipeline import build_pipeline
from framework.worker.request_table import RequestTable
from framework_backends import cpu_thresholds
from framework_backends.cpu_groups import Groups, rough_error
from framework_backends.cpu_sampler_ops import CpuSamplerOps

CPU = torch.device("cpu")
OURS = {
    "allowed_ids": "AllowedIds", "penalties": "Penalties", "temperature": "Temperature", "min_p": "MinP",
    "top_k": "TopK", "top_p": "TopP", "xtc": "Xtc", "gumbel": "Gumbel", "greedy": "Greedy",
}  # fmt: skip
DRAWN = tuple(name for name in OURS if name not in ("greedy", "xtc"))


class OnlySecond:
    """A third party's threshold between ours: nothing better than the second best token."""

    spec = StageSpec("only_second", kind="threshold", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return not params.is_greedy

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        pass

    def bounds(self, logits, rows, lo, hi):
        return lo, torch.minimum(hi, logits.topk(2).values[:, 1])

    def commit(self, rows, sampled, num_valid):
        pass


class _Stages:
    """The part of a registry that a pipeline needs."""

    def load_target(self, kind, name):
        return OnlySecond if name == "only_second" else getattr(import_module(f"framework_samplers.{name}"), OURS[name])

    def spec(self, kind, name):
        return ComponentSpec(kind, name, "tests:Stage")

    def label(self, spec):
        return f"'{spec.name}' of tests"

    def load_config_class(self, spec):
        return None


class Counting(CpuSamplerOps):
    """Counts its calls: a test that compares torch with torch shows nothing."""

    def __init__(self):
        self.num_calls = 0

    def sample(self, *args):
        self.num_calls += 1
        return super().sample(*args)


def pipeline_of(names, vocab, ops):
    table = RequestTable(9, 64, CPU, step_ops)

    def context(key, spec):
        table.declare(key, [one.sized(vocab) for one in spec.fields])
        return StageContext(CPU, vocab, 9, 9, (), lambda name: table.column(key, name), table.token_ids)

    config = SamplerConfig("gumbel", tuple(StageConfig(n, n, {}) for n in names), "raw_logprobs")
    pipeline = build_pipeline(config, _Stages(), context, ops=ops)
    table.allocate(())
    return pipeline, table


@dataclass
class Pair:
    """The same requests with the stages and with the operations: row i + 1 serves the i-th."""

    names: tuple[str, ...] = DRAWN
    vocab: int = 700
    sides: list[Any] = field(default_factory=list)
    count: int = 0

    def __post_init__(self):
        self.ops = Counting()
        self.sides = [pipeline_of(self.names, self.vocab, ops) for ops in (None, self.ops)]

    def add(self, *requests):
        for words in requests:
            self.count += 1
            params = SamplingParams(**words)
            for pipeline, table in self.sides:
                new = NewRequest(self.count, str(self.count), np.array([1, 2, 3], np.int32), 3, 0, params, 7)
                table.add(new)
                pipeline.add_request(self.count, params, new)
                table.apply()
        return self

    def rows(self, numbers, position):
        count = len(numbers)
        return Rows(
            req_idx=torch.tensor(numbers),
            offset=torch.zeros(count, dtype=torch.int32),
            position=torch.full((count,), position),
            seed=torch.tensor(numbers) * 7919 - 20000,
            drafts=torch.zeros(count, 0, dtype=torch.int64),
            num_drafts=torch.zeros(count, dtype=torch.int32),
            req_idx_np=np.array(numbers, np.int32),
        )

    def both(self, logits, position=5, numbers=None):
        """(result of the stages, of the operations); logits row i is that of numbers[i], all rows by default."""
        numbers = list(range(1, self.count + 1)) if numbers is None else numbers
        self.ops.num_calls = 0
        results = [p.sample(logits.clone(), self.rows(numbers, position)) for p, _ in self.sides]
        assert self.ops.num_calls == 1
        return results

    def agree(self, logits, positions=range(5, 13)):
        for position in positions:
            plain, fused = self.both(logits, position)
            assert fused.told.tolist() == plain.told.tolist(), position


def logits_of(count, vocab=700, dtype=torch.bfloat16, spread=2.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, vocab, generator=generator) * spread).to(dtype)


def rows_of_kinds(vocab):
    """Peaked, flat, very flat, one value, two values, mostly masked."""
    logits = logits_of(6, vocab, torch.float32, 1.0, seed=1) * torch.tensor([4.0, 1.0, 0.01, 0, 0, 2]).unsqueeze(1)
    logits[4, ::3] = 1.0
    logits[5, 20:] = -torch.inf
    return logits.to(torch.bfloat16)


WORDS = [
    {}, {"temperature": 0.6}, {"temperature": 30.0}, {"top_k": 5}, {"top_k": 400}, {"top_p": 0.9}, {"top_p": 1e-6},
    {"top_p": 0.999, "temperature": 1.7}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.7},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.95, "temperature": 0.7}, {"allowed_token_ids": [5, 6, 300, 699]},
    {"repetition_penalty": 1.7, "temperature": 0.8, "top_k": 20},
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_draws_are_those_of_the_stages(words, dtype):
    pair = Pair().add(words, words, {}, words, words, words, words | {"temperature": 0})
    logits = torch.cat([rows_of_kinds(700).to(dtype), logits_of(1, dtype=dtype)])
    pair.agree(logits)


@pytest.mark.parametrize("vocab", [1, 100, 128, 129, 9000])
def test_any_vocabulary_is_served(vocab):
    pair = Pair(vocab=vocab).add({}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2}, {"top_p": 0.99}, {"top_k": 150})
    pair.agree(logits_of(6, vocab))


@pytest.mark.parametrize(
    "words", [{"top_p": 0.5}, {"top_p": 0.97}, {"top_k": 40}, {"top_k": 600}, {"top_k": 5000}, {"min_p": 0.3}], ids=str
)
def test_bounds_are_those_of_the_stages_whatever_tier_finds_them(words):
    logits = rows_of_kinds(9000).float()
    pair = Pair((*words, "gumbel"), 9000).add(*[words] * 6)
    rows, (stage, _) = pair.rows(range(1, 7), 5), pair.sides[0][0].stages
    for floor in (-torch.inf, 0.5):
        lo, hi = torch.full((6,), floor), torch.full((6,), torch.inf)
        expected = stage.stage.bounds(logits, rows, lo, hi)[0]
        found = pair.ops.bounds(logits, rows, [(stage.spec.fused, stage.stage.operands(rows))], lo, hi)[0]
        kept = [(logits >= bound.unsqueeze(1)).tolist() for bound in (found, expected)]
        assert kept[0] == kept[1]


def test_rough_masses_decide_nothing_that_exact_ones_decide_otherwise(monkeypatch):
    made, exact = [], cpu_thresholds._exact_mass
    monkeypatch.setattr(cpu_thresholds, "_exact_mass", lambda *args: made.append(len(args[2])) or exact(*args))
    monkeypatch.setattr(cpu_thresholds, "rough_error", lambda top: top * 0 + 0.05)  # so that rows are unsure
    logits = rows_of_kinds(9000).float()
    for p in (0.3, 0.9):
        pair = Pair(("top_p", "gumbel"), 9000).add(*[{"top_p": p}] * 6)
        pair.agree(logits, [5])
        rows, (stage, _) = pair.rows(range(1, 7), 5), pair.sides[0][0].stages
        lo, hi = open_interval(6, CPU)
        expected = stage.stage.bounds(logits, rows, lo, hi)[0]
        found = pair.ops.bounds(logits, rows, [("top_p", stage.stage.operands(rows))], lo, hi)[0]
        assert (logits >= found.unsqueeze(1)).tolist() == (logits >= expected.unsqueeze(1)).tolist()
    assert made


@pytest.mark.parametrize("words", [{"top_p": 0.9}, {"top_k": 30, "top_p": 0.8}], ids=str)
def test_rows_far_from_zero_spoil_no_others(words):
    pair, logits = Pair().add(*[words] * 4, words | {"temperature": 0.003}, words), logits_of(6, dtype=torch.float32)
    logits[0] += 70
    logits[1] += 300
    logits[2, 9] = torch.inf
    logits[3] -= 300
    pair.agree(logits)


@pytest.mark.parametrize("words", [{"top_p": 0.9}, {"min_p": 0.01, "top_p": 0.9}], ids=str)
def test_rows_with_other_thresholds_share_a_step(words):
    pair = Pair().add(words, {"top_k": 5, "top_p": 0.5}, {"top_k": 7}, {"min_p": 0.1, "top_p": 0.7}, words, {})
    pair.agree(logits_of(6))


def test_stages_of_third_parties_run_between_the_operations():
    for names in (("temperature", "only_second", "top_k", "gumbel"), ("temperature", "top_k", "only_second", "gumbel")):
        pair = Pair(names).add({"temperature": 0.8, "top_k": 12}, {"top_k": 3})
        pair.agree(logits_of(2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("words", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 9}, {"min_p": 0.1}], ids=str)
def test_a_row_that_is_not_numbers_is_told_and_its_neighbour_is_well(words, value):
    pair, logits = Pair().add(words, words), logits_of(2)
    logits[0, 77] = value
    if value == -torch.inf:
        logits[0] = value
    plain, fused = pair.both(logits)
    assert fused.told.tolist() == [-1, plain.told[1]]
    assert 0 <= fused.ids[0] < 700


def test_a_row_alone_draws_what_it_draws_among_others():
    pair = Pair(vocab=9000).add({"top_p": 0.9}, {"top_k": 7}, {"temperature": 0}, {"min_p": 0.1}, {"top_p": 0.99}, {})
    logits = logits_of(6, 9000)
    _, together = pair.both(logits)
    for place in range(6):
        _, alone = pair.both(logits[place : place + 1], numbers=[place + 1])
        for name in ("ids", "told", "top", "chosen"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[place : place + 1]), name


def test_logits_of_the_model_stay_as_they_are():
    pair = Pair().add({"temperature": 0.5, "top_k": 3, "logprobs": 2}, {"top_p": 0.9})
    logits = logits_of(2, dtype=torch.float32)
    given = logits.clone()
    pair.sides[1][0].sample(given, pair.rows([1, 2], 5))
    assert torch.equal(given, logits)


@pytest.mark.parametrize("vocab", [40, 700, 9000])
@pytest.mark.parametrize("is_log", [True, False])
def test_logprobs_and_ranks_equal_those_of_torch_bit_for_bit(is_log, vocab):
    logits, ids = rows_of_kinds(vocab), torch.tensor([5, 11, 30, 7, 0, 39])
    for k in (0, 1, 5, 20):
        told, expected = CpuSamplerOps().logprobs(logits, ids, k, is_log=is_log), measure(logits, ids, k, is_log=is_log)
        (best,) = expected.best
        pairs = zip(
            (told.sampled, told.rank, told.top_ids, told.top_logprobs, told.top_ranks),
            (expected.sampled, expected.rank, best.ids, best.logprobs, best.ranks),
            strict=True,
        )
        for found, wanted in pairs:
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def test_a_pipeline_tells_the_same_logprobs_by_either_side():
    pair = Pair().add({"logprobs": 0}, {"logprobs": 3, "temperature": 0}, {})
    results = pair.both(logits_of(3))
    told = [to_host(result.logprobs, 3) for result in results]
    for name in ("sampled", "rank", "top_ids", "top_logprobs", "top_ranks"):
        np.testing.assert_array_equal(getattr(told[0], name), getattr(told[1], name))


@pytest.mark.parametrize("far", [-50.0, 0.0, 25.0, 50.0])
def test_rough_masses_are_as_near_as_they_say(far):
    logits, factor = rows_of_kinds(9000).float() * 0.5 + far, np.full(6, np.float32(1.05))
    groups = Groups(logits, factor, with_mass="rough")
    exact = (logits * torch.from_numpy(factor).unsqueeze(1)).double().exp().sum(1).numpy()
    off = np.abs(groups.mass.sum(1, dtype=np.float64) / exact - 1)
    assert (off < rough_error(np.abs(groups.top))).all()


@pytest.mark.parametrize("count", [1, 30, 36, 500, 5000, 9000])
def test_best_tokens_are_as_many_as_asked_for(count):
    logits = rows_of_kinds(9000)
    falling = Groups(logits).falling(np.arange(6), np.full(6, count)).padded()
    assert falling.shape[1] >= count
    expected = logits.float().sort(1, descending=True).values[:, :count].numpy()
    np.testing.assert_array_equal(falling[:, :count], expected)


def test_keys_of_rows_in_numpy_equal_those_in_torch():
    seed, position = torch.tensor([0, -1, 2**63 - 1, 12345, -(2**40)]), torch.tensor([0, 1, 2**31, 77, 5])
    keys = row_keys_np(seed.numpy(), position.numpy(), 3)
    assert keys.astype(np.int64).tolist() == row_keys(seed, position, 3).tolist()
