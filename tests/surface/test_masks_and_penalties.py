"""Masks, logit bias and penalties through every way of running an engine: each processed logit, by a reference."""

import math
from collections import Counter

import pytest
import torch

from framework import LLM, SamplingParams
from framework.errors import RequestError

VOCAB, BOS, EOS = 24, 1, 3
SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.block_size=4")
PROMPT = [4, 9, 1, 17, 2, 20, 8, 5, 11, 6, 19]
RUNS = {
    "sync": ["engine.async_scheduling=false", "kv_cache.num_blocks=64"],
    "async": ["engine.async_scheduling=true", "kv_cache.num_blocks=64"],
    "chunks of 3": ["scheduler.max_num_batched_tokens=3", "kv_cache.num_blocks=64"],
    "preempted": ["kv_cache.num_blocks=17"],
    "preempted async": ["kv_cache.num_blocks=17", "engine.async_scheduling=true"],
    "swapped": ["kv_cache.num_blocks=17", "scheduler.preemption=swap"],
}
REQUESTS = (
    {},
    {"repetition_penalty": 2.0},
    {"frequency_penalty": 0.5, "temperature": 0},
    {"presence_penalty": 0.5, "temperature": 0.5},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 2.0, "logit_bias": {7: 2.5, 0: -9.0}},
    {"allowed_token_ids": [5, 6, 7, 8, 12, 20], "bad_words_token_ids": [[5, 6], [7, 7], [12], [6, 8, 20]]},
    {"allowed_token_ids": [EOS, 4, 5, 6], "min_tokens": 20, "logit_bias": {EOS: 50.0}},
    {"extra_args": {"no_repeat_ngram": {"size": 2}}, "temperature": 0, "repetition_penalty": 1.5},
)


@pytest.fixture(scope="module")
def table():
    """[V, V] logits of the model `mixed`."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5


@pytest.fixture(scope="module", params=RUNS)
def running(request, folders):
    """(name of the run, engine that tells processed logits)."""
    words = [*SMALL, "sampler.logprobs_mode=processed_logits", *RUNS[request.param]]
    with LLM(folders["mixed"], overrides=words) as llm:
        yield request.param, llm


def masked(p, prompt, outputs):
    """Ids that may not be drawn next."""
    ids = set() if p.allowed_token_ids is None else set(range(VOCAB)) - set(p.allowed_token_ids)
    ids |= {EOS} if len(outputs) < p.min_tokens and not p.ignore_eos else set()
    for *before, last in p.bad_words_token_ids or ():
        if outputs[len(outputs) - len(before) :] == before:
            ids.add(last)
    size, tokens = (p.extra_args or {}).get("no_repeat_ngram", {}).get("size", 0), [*prompt, *outputs]
    if size:
        ids |= {tokens[i] for i in range(size - 1, len(tokens)) if tokens[i - size + 1 : i] == tokens[1 - size :]}
    return ids


def processed(row, p, prompt, outputs):
    """[V] what is left of logits `row` behind masks, bias, penalties and temperature, in the order of the pipeline."""
    row = row.clone()
    row[list(masked(p, prompt, outputs))] = -math.inf
    for i, value in (p.logit_bias or {}).items():
        row[i] += value
    for i in {*prompt, *outputs}:
        row[i] = row[i] / p.repetition_penalty if row[i] > 0 else row[i] * p.repetition_penalty
    for i, count in Counter(outputs).items():
        row[i] -= p.frequency_penalty * count + p.presence_penalty
    return row if p.is_greedy else row / p.temperature


def asked(**request):
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": "min_tokens" not in request, "logprobs": -1, **request})


def check(completion, p, prompt, table):
    """Every logit that the draw of each token saw."""
    tokens = completion.token_ids
    for place, entry in enumerate(completion.logprobs):
        exact = processed(table[[*prompt, *tokens][len(prompt) + place - 1]], p, prompt, tokens[:place])
        told = torch.tensor([entry[i].logprob for i in range(VOCAB)])
        torch.testing.assert_close(told, exact, atol=5e-5, rtol=0)
        assert exact[tokens[place]] > -math.inf
        if p.is_greedy:
            assert exact[tokens[place]] >= exact.max() - 1e-4


def test_every_processed_logit_follows_the_pipeline_however_the_engine_runs(running, table):
    name, llm = running
    each = [asked(seed=i, **request) for i, request in enumerate(REQUESTS)]
    prompts = [PROMPT[i % 4 :] for i in range(len(each))]
    outputs = llm.generate(prompts, each, use_tqdm=False)
    assert (llm.engine.stats()["num_preemptions"] > 0) == ("preempted" in name or name == "swapped")
    for prompt, p, output in zip(prompts, each, outputs, strict=True):
        assert output.outputs[0].finish_reason == "length"
        check(output.outputs[0], p, prompt, table)


def test_penalties_c4(running, table):
    """CASES C4: repetition touches the prompt's tokens from the first output on, the others only what came out."""
    _, llm = running
    requests = ({}, {"repetition_penalty": 2.0}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5})
    each = [asked(temperature=0, max_tokens=8, **request) for request in requests]
    prompt, found = [5, 5, 7], {}
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        outputs = llm.generate([prompt] * 4, [each[i] for i in order], use_tqdm=False)
        found[order] = dict(zip(order, (o.outputs[0] for o in outputs), strict=True))
    for i, p in enumerate(each):
        first, second = (completions[i] for completions in found.values())
        assert first.token_ids == second.token_ids
        check(first, p, prompt, table)
        touched = {t for t in range(VOCAB) if abs(first.logprobs[0][t].logprob - table[7, t].item()) > 1e-4}
        assert touched == ({5, 7} if i == 1 else set())


class TestBadWordsC3:
    """CASES C3, by text: a tokenizer that puts <s> before every text."""

    def test_word_of_several_tokens_is_banned_behind_its_own_beginning_alone(self, chain):
        words = SamplingParams(temperature=0, max_tokens=3, bad_words=["w7 w8"])
        broken, whole, other = chain.generate([[6], [7], [9]], words)
        assert broken.outputs[0].token_ids == [7, 0, 1]  # 8 was banned, and 0 is the lowest of the rest
        assert whole.outputs[0].token_ids == [8, 9, 10]  # a 7 of the prompt counts for nothing
        assert other.outputs[0].token_ids == [10, 11, 12]

    @pytest.mark.parametrize("word", ["w6", " w6"])
    def test_word_of_one_token_is_always_banned_and_no_special_token_with_it(self, chain, word):
        params = SamplingParams(temperature=0, max_tokens=1, bad_words=word, allowed_token_ids=[BOS, 6])
        banned, free = chain.generate([[5], [5]], [params, params.replace(bad_words=None)])
        assert banned.outputs[0].token_ids == [BOS] and free.outputs[0].token_ids == [6]

    def test_model_without_a_tokenizer_refuses_strings(self, folders):
        with LLM(folders["bare"], overrides=SMALL) as llm:
            with pytest.raises(RequestError, match=r"bad_words=\['w6'\] needs text.*use bad_words_token_ids"):
                llm.generate([4], SamplingParams(bad_words="w6"))
            assert llm.generate([4], SamplingParams(bad_words_token_ids=[[6]]))[0].outputs[0].token_ids


def test_row_that_masks_empty_ends_alone_with_the_stages_named(chain):
    empty = SamplingParams(
        temperature=0, max_tokens=5, allowed_token_ids=[4, 5], bad_words_token_ids=[[4], [5, 5]], logit_bias={4: 100}
    )
    failed, fine = chain.generate([[9], [9]], [empty, SamplingParams(temperature=0, max_tokens=2)])
    (completion,) = failed.outputs
    assert (completion.finish_reason, completion.token_ids) == ("error", [5])
    assert "stages allowed_ids, bad_words together mask the whole vocabulary" in failed.error
    assert fine.outputs[0].token_ids == [10, 11] and fine.error is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [4, 24]}, r"allowed_token_ids holds 24, outside the vocabulary 0\.\.23"),
        ({"logit_bias": {24: 1}}, r"logit_bias holds 24, outside the vocabulary 0\.\.23"),
        ({"bad_words_token_ids": [[4], [5, 24]]}, r"bad_words_token_ids holds 24, outside the vocabulary 0\.\.23"),
        ({"allowed_token_ids": [4], "stages": {"allowed_ids": False}}, "stages cannot switch 'allowed_ids' off"),
        (
            {"bad_words": "w4", "stages": {"bad_words": False}},
            r"stages switches off 'bad_words', .* bad_words=\('w4',\)",
        ),
        ({"extra_args": {"no_repeat_ngram": {"size": 0}}}, r"no_repeat_ngram\.size must be in 1\.\.64, got 0"),
        (
            {"allowed_token_ids": [4, 5], "bad_words_token_ids": [[4], [5], [6, 7]]},
            r"allowed_token_ids=\[4, 5\] leaves no token: every id of it is forbidden by bad_words_token_ids\.",
        ),
        (
            {"allowed_token_ids": [4, 5], "bad_words": "w4", "bad_words_token_ids": [[5]]},
            r"allowed_token_ids=\[4, 5\] .*is forbidden by bad_words and bad_words_token_ids\.",
        ),
    ],
)
def test_constraint_that_cannot_be_served_is_refused_before_anything_runs(chain, params, message):
    before = chain.engine.stats()
    with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
        chain.generate([[4], [5]], [SamplingParams(), SamplingParams(**params)])
    assert chain.engine.stats() == before


def test_allow_list_of_which_one_id_may_be_drawn_is_served(chain):
    params = SamplingParams(max_tokens=2, allowed_token_ids=[4, 5], bad_words_token_ids=[[4], [5, 6]])
    assert chain.generate([9], params)[0].outputs[0].token_ids == [5, 5]


def test_penalties_are_switched_off_by_the_request(chain):
    params = SamplingParams(temperature=0, max_tokens=2, stages={"penalties": False})
    assert chain.generate([9], params)[0].outputs[0].token_ids == [10, 11]
    with pytest.raises(RequestError, match="stages switches off 'penalties'"):
        chain.generate([9], params.replace(repetition_penalty=2.0))


def test_repetition_penalty_of_the_checkpoint_serves_requests_without_parameters(folders, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folders["mixed"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text('{"repetition_penalty": 10.0, "top_k": 1}')
    with LLM(folder, overrides=[*SMALL, "sampler.max_tokens=12"]) as llm:
        asks = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=10.0)
        none, same, without = llm.generate([PROMPT] * 3, [None, asks, asks.replace(repetition_penalty=1.0)])
    assert none.outputs[0].token_ids == same.outputs[0].token_ids != without.outputs[0].token_ids
