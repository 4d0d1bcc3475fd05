"""entropy and chosen_ids tell, for each token, what the caller reads in CompletionOutput.payloads."""

import math
from itertools import chain

import pytest
import torch

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted
from framework.testing.stages import CHECKS, StageCase, context, make_rows, new_request
from framework_samplers.chosen_ids import ChosenIds
from framework_samplers.entropy import Entropy
from framework_samplers.options import ChosenIdsConfig

VOCAB = 20
WATCHED = ["+sampler/stage=[entropy,chosen_ids]", "engine.dtype=float32"]
ENTROPY = {"entropy": {}}


def asking(**given):
    return SamplingParams(extra_args={"chosen_ids": given})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_entropy_keeps_its_contract(check):
    wanting = (SamplingParams(extra_args=ENTROPY), SamplingParams(temperature=0, extra_args=ENTROPY))
    check(StageCase(Entropy, wanting))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_chosen_ids_keeps_its_contract(check):
    check(StageCase(ChosenIds, (asking(), asking(ids=[299, 0, 5])), options=ChosenIdsConfig([3])))


@pytest.mark.parametrize("vocab", [1, 127, 128, 3001])
def test_entropy_agrees_with_the_definition(random_logits, vocab):
    raw = random_logits(3, vocab).to(torch.bfloat16)
    processed = raw.float().masked_fill(raw < raw.float().median(-1, keepdim=True).values, -torch.inf)
    stage = Entropy({}, context(Entropy.spec, vocab))
    told = stage.collect(stage.observe(raw, processed, make_rows([1, 2, 3]), raw.argmax(-1)))
    for place, entry in enumerate(told):
        for name, logits in (("raw", raw), ("processed", processed)):
            log_p = logits[place].double().log_softmax(-1)
            exact = -float((log_p.exp() * log_p).nansum())
            assert entry[name] == pytest.approx(exact, abs=1e-5)


def test_chosen_ids_are_exact_far_from_zero(random_logits):
    raw = random_logits(2, 3001) + 20_000
    stage = ChosenIds(ChosenIdsConfig(), context(ChosenIds.spec, 3001))
    for row in (1, 2):
        stage.add_request(row, asking(ids=[7, 3000]), new_request(row, asking()))
    told = stage.collect(stage.observe(raw, raw, make_rows([1, 2]), raw.argmax(-1)))
    for place, entry in enumerate(told):
        assert entry["logits"] == {i: float(raw[place, i]) for i in (7, 3000)}
        exact = raw[place].double().log_softmax(-1)
        assert entry["logprobs"] == {i: pytest.approx(float(exact[i]), abs=1e-5) for i in (7, 3000)}


@pytest.fixture(scope="module")
def table():
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


@pytest.fixture(scope="module")
def llm(table, tmp_path_factory):
    folder = save_crafted(tmp_path_factory.mktemp("watched"), table)
    words = [*WATCHED, "sampler.stages.chosen_ids.ids=[1,2]", "scheduler.max_num_seqs=4"]
    with LLM(str(folder), overrides=words) as llm:
        yield llm


def entropy_of(logits):
    log_p = logits.double().log_softmax(-1)
    return -float((log_p.exp() * log_p).nansum())


def test_a_request_is_told_each_token_and_its_neighbours_are_not(llm, table):
    both = SamplingParams(seed=1, top_k=3, max_tokens=6, extra_args=ENTROPY | {"chosen_ids": {}})
    params = [
        SamplingParams(seed=2, max_tokens=9),
        both,
        SamplingParams(temperature=0, max_tokens=4, extra_args=ENTROPY),
    ]
    plain, watched, greedy = (out.outputs[0] for out in llm.generate([[0], [3], [5]], params))
    assert plain.payloads == {}
    assert set(watched.payloads) == {"entropy", "chosen_ids"} and set(greedy.payloads) == {"entropy"}
    before = [3, *watched.token_ids[:-1]]
    for last, told, chosen in zip(before, watched.payloads["entropy"], watched.payloads["chosen_ids"], strict=True):
        logits = table[last]
        best = logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf)
        assert told == {"raw": pytest.approx(entropy_of(logits), abs=1e-4),
                        "processed": pytest.approx(entropy_of(best), abs=1e-4)}  # fmt: skip
        exact = logits.log_softmax(-1)
        assert chosen["logprobs"] == {i: pytest.approx(float(exact[i]), abs=1e-4) for i in (1, 2)}
        assert chosen["logits"] == {i: pytest.approx(float(logits[i]), abs=1e-4) for i in (1, 2)}
    for last, told in zip([5, *greedy.token_ids[:-1]], greedy.payloads["entropy"], strict=True):
        assert told == {name: pytest.approx(entropy_of(table[last]), abs=1e-4) for name in ("raw", "processed")}


def test_deltas_of_a_stream_join_to_the_whole(llm):
    params = {"seed": 3, "max_tokens": 7, "extra_args": ENTROPY}
    [whole] = llm.generate([[1]], SamplingParams(**params))
    for kind in ("delta", "cumulative"):
        parts = [out.outputs[0] for out in llm.generate([[1]], SamplingParams(**params, output_kind=kind), stream=True)]
        assert all(len(part.payloads["entropy"]) == len(part.token_ids) for part in parts)
        told = [part.payloads["entropy"] for part in parts]
        assert (list(chain(*told)) if kind == "delta" else told[-1]) == whole.outputs[0].payloads["entropy"]


def test_each_of_n_completions_has_its_own(llm, table):
    [out] = llm.generate([[1]], SamplingParams(n=3, seed=3, max_tokens=5, extra_args=ENTROPY))
    for completion in out.outputs:
        raw = [told["raw"] for told in completion.payloads["entropy"]]
        assert raw == [pytest.approx(entropy_of(table[i]), abs=1e-4) for i in [1, *completion.token_ids[:-1]]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ids": []}, r"extra_args\.chosen_ids\.ids must not be empty"),
        ({"ids": [20]}, r"extra_args\.chosen_ids\.ids\[0\] must be in 0\.\.19, got 20"),
        ({"ids": list(range(20)) * 4}, r"extra_args\.chosen_ids\.ids must have at most 64 ids, got 80"),
        ({"ids": 3}, r"extra_args\.chosen_ids\.ids must be a list of token ids, got 3"),
        ({"id": [3]}, r"extra_args\.chosen_ids has no 'id'\. Did you mean 'ids'\?"),
    ],
)
def test_ids_that_cannot_be_told_are_refused(llm, given, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([[1]], asking(**given))


def test_a_masked_token_has_a_logprob_of_minus_infinity():
    raw = torch.tensor([[0.0, -math.inf]])
    stage = ChosenIds(ChosenIdsConfig([0, 1]), context(ChosenIds.spec, 2))
    stage.add_request(1, asking(), new_request(1, asking()))
    [told] = stage.collect(stage.observe(raw, raw, make_rows([1]), torch.tensor([0])))
    assert told["logprobs"] == {0: 0.0, 1: -math.inf}
