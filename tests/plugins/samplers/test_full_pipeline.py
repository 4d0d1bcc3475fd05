"""sampler=full: every stage in one pipeline, in its order, and requests with different ones in one batch."""

import pytest
import torch

from framework import LLM, SamplingParams
from framework.config import compose
from framework.testing.crafted import save_crafted

VOCAB = 160
ORDER = [
    "grammar", "allowed_ids", "min_tokens", "bad_words", "no_repeat_ngram", "thinking_budget", "logit_bias",
    "penalties", "dry", "temperature", "dynamic_temperature", "min_p", "top_k", "top_p", "typical", "top_n_sigma",
    "epsilon", "eta", "xtc", "gumbel", "entropy", "chosen_ids",
]  # fmt: skip
ALWAYS = [
    "engine.dtype=float32", "engine.batch_invariant=true", "kv_cache.block_size=4", "sampler=full",
    "sampler.stages.thinking_budget.start=1", "sampler.stages.thinking_budget.end=2",
]  # fmt: skip
EXTRA = [
    {"dry": {"multiplier": 2.0, "allowed_length": 1}, "xtc": {"threshold": 0.02}},
    {"dynamic_temperature": {"low": 0.5, "high": 1.8}, "typical": {"mass": 0.8}, "entropy": {}},
    {"top_n_sigma": {"n": 1.5}, "thinking_budget": {"max_tokens": 6}, "no_repeat_ngram": {"size": 2}},
    {"eta": {"epsilon": 0.02}, "epsilon": {"epsilon": 0.001}, "chosen_ids": {"ids": [5, 9]}},
    {"dry": {"multiplier": 1.0, "range": 9}, "xtc": {"probability": 1.0, "threshold": 0.01}, "eta": {"epsilon": 0.3}},
]
PROMPTS = [[3, 4, 5] * (2 + i) + [1] * (i == 2) for i in range(5)]


def params(i, **given):
    mixed = {"top_p": 0.95} if i % 2 else {"temperature": 1.3, "repetition_penalty": 1.1}
    return SamplingParams(seed=i, max_tokens=24, extra_args=EXTRA[i], **(mixed | given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    table = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    return str(save_crafted(tmp_path_factory.mktemp("full"), table))


@pytest.fixture(scope="module")
def alone(folder):
    with LLM(folder, overrides=ALWAYS) as llm:
        return [llm.generate([prompt], params(i))[0].outputs[0] for i, prompt in enumerate(PROMPTS)]


def test_stages_stand_in_their_order():
    assert [stage.key for stage in compose(["sampler=full"]).sampler.stages] == ORDER


@pytest.mark.parametrize(
    "words",
    [
        ["scheduler.max_num_batched_tokens=5"],
        ["kv_cache.num_blocks=21", "kv_cache.prefix_caching=false"],
        ["engine.async_scheduling=true", "kv_cache.num_blocks=21"],
    ],
    ids=["chunked", "preempted", "preempted with steps in flight"],
)
def test_requests_with_different_stages_share_a_batch_and_change_nothing(folder, alone, words):
    with LLM(folder, overrides=[*ALWAYS, *words]) as llm:
        outs = [out.outputs[0] for out in llm.generate(PROMPTS, [params(i) for i in range(5)])]
        assert ("num_blocks" in str(words)) == (llm.engine.stats()["num_preemptions"] > 0)
    for one, other in zip(alone, outs, strict=True):
        assert (one.token_ids, one.payloads) == (other.token_ids, other.payloads)


def test_each_request_is_served_what_it_asks_for(folder, alone):
    """Without its extra_args each of them draws other tokens; one that wants thinking ended has the end in time."""
    with LLM(folder, overrides=ALWAYS) as llm:
        plain = llm.generate(PROMPTS, [params(i).replace(extra_args=None) for i in range(5)])
    for one, other in zip(alone, plain, strict=True):
        assert one.token_ids != other.outputs[0].token_ids
    assert alone[2].token_ids.index(2) <= 6
    assert len(alone[1].payloads["entropy"]) == len(alone[3].payloads["chosen_ids"]) == 24


def test_a_request_that_asks_for_nothing_draws_what_it_draws_from_the_default_pipeline(folder):
    drawn = []
    for sampler in ("sampler=full", "sampler=gumbel"):
        with LLM(folder, overrides=[sampler, "engine.dtype=float32"]) as llm:
            outs = llm.generate(PROMPTS, [SamplingParams(seed=i, max_tokens=12, top_p=0.9) for i in range(5)])
            drawn.append([out.outputs[0].token_ids for out in outs])
    assert drawn[0] == drawn[1]


def test_a_stage_is_switched_off_by_a_request(folder):
    with LLM(folder, overrides=ALWAYS) as llm:
        given = {"seed": 4, "max_tokens": 12, "temperature": 1.5}
        free, cut, off = llm.generate([[3]] * 3, [
            SamplingParams(**given),
            SamplingParams(**given, extra_args={"top_n_sigma": {"n": 0.2}}),
            SamplingParams(**given, stages={"typical": False, "xtc": False}),
        ])  # fmt: skip
        assert free.outputs[0].token_ids == off.outputs[0].token_ids != cut.outputs[0].token_ids
        with pytest.raises(ValueError, match=r"extra_args has parameters for 'xtc', which stages switches off"):
            llm.generate([[3]], SamplingParams(extra_args={"xtc": {}}, stages={"xtc": False}))
