"""mirostat draws from the tokens whose surprise is at most mu, and moves mu towards its target."""

import math
from itertools import pairwise

import pytest
import torch

from framework import LLM, SamplingParams
from framework.sampling.draw import draw
from framework.sampling.interval import open_interval
from framework.testing.crafted import save_crafted
from framework.testing.stages import CHECKS, StageCase, context, make_rows, new_request
from framework_samplers.mirostat import RING, Mirostat
from framework_samplers.options import MirostatConfig

OPTIONS = MirostatConfig()


def params(**given):
    return SamplingParams(extra_args={"mirostat": given})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    wanting = (SamplingParams(), params(tau=1.0, eta=0.5), params(tau=3.0, eta=1.0))
    check(StageCase(Mirostat, wanting, options=OPTIONS))


class Reference:
    """The algorithm of the source in float64, which is told what was drawn."""

    def __init__(self, tau, eta):
        self.tau, self.eta, self.mu = tau, eta, 2 * tau

    def candidates(self, logits):
        bits = -logits.double().log_softmax(-1) / math.log(2)
        kept = bits <= self.mu
        return kept if kept.any() else bits == bits.min()

    def learn(self, logits, token):
        among = logits.double().masked_fill(~self.candidates(logits), -torch.inf)
        surprise = -float(among.log_softmax(-1)[token]) / math.log(2)
        self.mu -= self.eta * (surprise - self.tau)


@pytest.mark.parametrize(("tau", "eta"), [(0.5, 0.3), (2.0, 0.1), (5.0, 1.0)])
def test_follows_the_algorithm_of_the_source(tau, eta):
    vocab, steps = 301, 40
    ctx = context(Mirostat.spec, vocab, 2)
    stage, reference = Mirostat(OPTIONS, ctx), Reference(tau, eta)
    stage.add_request(1, params(tau=tau, eta=eta), new_request(1, params()))
    generator = torch.Generator().manual_seed(3)
    narrowed = 0
    for i in range(steps):
        logits = torch.randn(1, vocab, generator=generator) * 3
        rows = make_rows([1], positions=[3 + i])
        kept = reference.candidates(logits[0])
        narrowed += not kept.all()
        among = logits.masked_fill(~kept, -torch.inf)
        wanted = draw(among, rows.seed, rows.position, *open_interval(1, logits.device))
        ids = stage.select(logits, rows, *open_interval(1, logits.device))
        assert ids.tolist() == wanted.tolist()
        stage.commit(rows, ids.unsqueeze(1), torch.ones(1, dtype=torch.int32))
        reference.learn(logits[0], int(ids))
        assert float(ctx.column("mu").dev[1, (4 + i) % RING]) == pytest.approx(reference.mu, abs=1e-4)
    assert narrowed > 5


def test_the_best_token_stays_where_all_surprise_too_much():
    stage = Mirostat(OPTIONS, context(Mirostat.spec, 1000, 2))
    stage.add_request(1, params(tau=0.01), new_request(1, params()))
    logits = torch.zeros(1, 1000)
    logits[0, 77] = 0.01
    assert stage.select(logits, make_rows([1]), *open_interval(1, logits.device)).tolist() == [77]


def test_measures_and_draws_inside_the_interval_only():
    stage = Mirostat(OPTIONS, context(Mirostat.spec, 4, 2))
    stage.add_request(1, params(tau=0.6), new_request(1, params()))  # mu 1.2 bits
    logits = torch.tensor([[9.0, 1.0, 1.0, -5.0]])
    drawn = {
        int(stage.select(logits, make_rows([1], seeds=[seed]), torch.tensor([0.0]), torch.tensor([2.0])))
        for seed in range(40)
    }
    assert drawn == {1, 2}


def test_steers_the_surprise_of_a_text_to_its_target(tmp_path):
    vocab, tau = 64, 2.0
    table = 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0))
    with LLM(str(save_crafted(tmp_path, table)), overrides=["sampler=mirostat", "engine.dtype=float32"]) as llm:
        [out] = llm.generate([[0]], SamplingParams(seed=4, max_tokens=200, extra_args={"mirostat": {"tau": tau}}))
    ids = [0, *out.outputs[0].token_ids]
    reference, surprises = Reference(tau, 0.1), []
    for last, token in pairwise(ids):
        among = table[last].double().masked_fill(~reference.candidates(table[last]), -torch.inf)
        surprises.append(-float(among.log_softmax(-1)[token]) / math.log(2))
        assert reference.candidates(table[last])[token]
        reference.learn(table[last], token)
    assert sum(surprises[50:]) / 150 == pytest.approx(tau, abs=0.3)


@pytest.mark.parametrize("words", [[], ["engine.async_scheduling=true"], ["scheduler.preemption=swap"]])
def test_a_preempted_request_goes_on_with_its_mu(tmp_path, words):
    table = 2 * torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    folder = str(save_crafted(tmp_path, table))
    always = ["sampler=mirostat", "engine.dtype=float32", "kv_cache.block_size=4", "kv_cache.prefix_caching=false"]
    requests = [
        SamplingParams(seed=seed, max_tokens=40, extra_args={"mirostat": {"tau": 1.5, "eta": 0.7}}) for seed in range(8)
    ]
    runs = []
    for more in ([], ["kv_cache.num_blocks=30", *words]):
        with LLM(folder, overrides=[*always, *more]) as llm:
            runs.append([out.outputs[0].token_ids for out in llm.generate([[0]] * 8, requests)])
            num_preemptions = llm.engine.stats()["num_preemptions"]
    assert num_preemptions > 0
    assert runs[0] == runs[1]


def test_a_parameter_that_no_stage_of_the_pipeline_reads_is_refused(tmp_path):
    with (
        LLM(str(save_crafted(tmp_path, torch.eye(5))), overrides=["sampler=mirostat"]) as llm,
        pytest.raises(ValueError, match=r"sampler=mirostat has no stage that reads top_k=3"),
    ):
        llm.generate([[0]], SamplingParams(top_k=3))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"tau": 0}, r"tau must be in \(0, 100\], got 0"), ({"eta": -1}, r"eta must be in \[0, 1\], got -1")],
)
def test_parameters_and_options_outside_of_their_range_are_refused(given, message):
    with pytest.raises(ValueError, match=rf"extra_args\.mirostat\.{message}"):
        Mirostat(OPTIONS, context(Mirostat.spec)).validate(params(**given))
    with pytest.raises(ValueError, match=message):
        Mirostat(MirostatConfig(**{"tau": 1.0, "eta": 0.1} | given), context(Mirostat.spec))
