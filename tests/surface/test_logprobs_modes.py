"""The four modes of `sampler.logprobs_mode`, and `logprob_token_ids`, through every way of running an engine."""

import json
import math

import pytest
import torch

from framework import LLM, SamplingParams
from framework.cli import main

VOCAB, EOS = 24, 3
SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.block_size=4")
PROMPT = [4, 9, 1, 17, 2, 20, 8, 5, 11, 6, 19]
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
RUNS = {
    "sync": ["engine.async_scheduling=false", "kv_cache.num_blocks=64"],
    "async": ["engine.async_scheduling=true", "kv_cache.num_blocks=64"],
    "chunks of 3": ["scheduler.max_num_batched_tokens=3", "kv_cache.num_blocks=64"],
    "preempted": ["kv_cache.num_blocks=17"],
    "preempted async": ["kv_cache.num_blocks=17", "engine.async_scheduling=true"],
    "swapped": ["kv_cache.num_blocks=17", "scheduler.preemption=swap"],
}
# greedy beside drawn ones, asking ones beside others; top_p is checked exactly in tests/sampling
REQUESTS = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.5, "top_k": 4, "logprobs": 6},
    {"temperature": 2.0},
    {"temperature": 1.5, "min_p": 0.2, "logprobs": -1, "min_tokens": 20},
    {"top_k": 1, "min_p": 0.5, "logprobs": 0, "min_tokens": 20},
    {"top_k": 3, "logprob_token_ids": [3, 7, 23]},
    {"temperature": 2.0, "logprobs": 1, "logprob_token_ids": [0]},
    {
        "temperature": 0,
        "logit_bias": {7: 3.0, 8: -2.0},
        "frequency_penalty": 0.5,
        "presence_penalty": 1.0,
        "logprobs": 3,
    },
    {"temperature": 0.7, "allowed_token_ids": range(5, 20), "frequency_penalty": -0.5, "top_k": 4, "logprobs": 8},
)


@pytest.fixture(scope="module")
def table():
    """[V, V] float64 logits of the model `mixed`."""
    return (torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5).double()


@pytest.fixture
def engine(folders):
    made = []

    def make(mode, *words, model="mixed"):
        made.append(LLM(folders[model], overrides=[*SMALL, f"sampler.logprobs_mode={mode}", *words]))
        return made[-1]

    yield make
    for one in made:
        one.close()


ENGINES = [*((mode, "sync") for mode in MODES), *((MODES[1 + i % 3], run) for i, run in enumerate(RUNS) if i)]


@pytest.fixture(scope="module", params=ENGINES, ids=", ".join)
def running(request, folders):
    """(mode, engine) of every mode, and of every way of running in one of the modes that are not the default."""
    mode, run = request.param
    with LLM(folders["mixed"], overrides=[*SMALL, f"sampler.logprobs_mode={mode}", *RUNS[run]]) as llm:
        yield mode, llm


def told(row, mode, p, before):
    """[V] what a mode tells of the token drawn from logits `row` when the output has the tokens `before`."""
    if mode.startswith("processed"):
        row = row.clone()
        if p.allowed_token_ids:
            row[[i for i in range(VOCAB) if i not in p.allowed_token_ids]] = -torch.inf
        if len(before) < p.min_tokens and not p.ignore_eos:
            row[EOS] = -torch.inf
        for i, bias in (p.logit_bias or {}).items():
            row[i] += bias
        for i in set(before):
            row[i] -= p.frequency_penalty * before.count(i) + p.presence_penalty
        if not p.is_greedy:
            row /= p.temperature
            if p.min_p > 0:
                row[row < row.max() + math.log(p.min_p)] = -torch.inf
            if 0 < p.top_k < VOCAB:
                row[row < row.topk(p.top_k).values[-1]] = -torch.inf
    return row if mode.endswith("logits") else row.log_softmax(-1)


def check(completion, last, mode, p, table):
    """Every entry of a completion that follows token `last`."""
    if not p.asks_logprobs:
        assert completion.logprobs is None and completion.cumulative_logprob is None
        return
    tokens, total = completion.token_ids, 0.0
    assert len(completion.logprobs) == len(tokens)
    for place, (before, token, entry) in enumerate(zip([last, *tokens], tokens, completion.logprobs, strict=False)):
        exact = told(table[before], mode, p, tokens[:place])
        order = sorted(range(VOCAB), key=lambda i: (-exact[i].item(), i))
        k = VOCAB if p.logprobs == -1 else p.logprobs or 0
        assert set(entry) == {token, *order[:k], *(p.logprob_token_ids or ())}
        for i, one in entry.items():
            assert one.logprob == pytest.approx(exact[i].item(), abs=5e-5)
            assert one.rank == 1 + int((exact > exact[i]).sum())
        assert entry[token].logprob > -math.inf
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)


def test_every_mode_tells_the_same_however_the_engine_runs(running, table):
    mode, llm = running
    each = [
        SamplingParams(seed=i, max_tokens=20, ignore_eos="min_tokens" not in r, **r) for i, r in enumerate(REQUESTS)
    ]
    prompts = [PROMPT[: 3 + i] for i in range(len(each))]
    outputs = llm.generate(prompts, each, use_tqdm=False)
    stats = llm.engine.stats()
    assert (stats["num_preemptions"] > 0) == (stats["num_blocks"] < 64)
    for prompt, p, output in zip(prompts, each, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 20
        check(output.outputs[0], prompt[-1], mode, p, table)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_completions_of_one_prompt_each_have_their_own(engine, table, mode):
    p = SamplingParams(n=4, seed=3, temperature=1.5, top_k=5, max_tokens=6, ignore_eos=True, logprobs=5)
    (output,) = engine(mode).generate([PROMPT], p, use_tqdm=False)
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    for completion in output.outputs:
        check(completion, PROMPT[-1], mode, p, table)


def test_prefix_hit_changes_no_logprob(engine, table):
    llm = engine("processed_logprobs")
    p = SamplingParams(seed=3, top_k=5, max_tokens=6, ignore_eos=True, logprobs=5)
    cold, warm = (llm.generate([PROMPT], p, use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 8)
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs
    check(warm.outputs[0], PROMPT[-1], "processed_logprobs", p, table)


def test_kept_tokens_sum_to_one_and_the_others_are_minus_infinity(engine):
    p = SamplingParams(
        seed=3, temperature=0.7, top_k=7, top_p=0.8, min_p=0.01, max_tokens=8, ignore_eos=True, logprobs=-1
    )
    (output,) = engine("processed_logprobs").generate([PROMPT], p, use_tqdm=False)
    for entry in output.outputs[0].logprobs:
        kept = [one.logprob for one in entry.values() if one.logprob > -math.inf]
        assert 1 <= len(kept) <= 7 and len(entry) == VOCAB
        assert sum(map(math.exp, kept)) == pytest.approx(1, abs=1e-5)
        assert {one.rank for one in entry.values() if one.logprob == -math.inf} == {len(kept) + 1}


@pytest.mark.parametrize(("mode", "masked"), [("raw_logits", 8.0), ("processed_logits", -math.inf)])
def test_masked_token_is_minus_infinity_in_processed_modes_only(engine, mode, masked):
    p = SamplingParams(temperature=0, max_tokens=1, min_tokens=1, logprob_token_ids=[EOS])
    (output,) = engine(mode, model="chain").generate([[2]], p, use_tqdm=False)
    assert output.outputs[0].token_ids == [0]  # all others are equal
    assert output.outputs[0].logprobs[0][EOS].logprob == pytest.approx(masked)
    assert output.outputs[0].logprobs[0][EOS].rank == (1 if mode == "raw_logits" else VOCAB)


def test_logprob_of_a_masked_token_is_null_in_the_output_file(folders, tmp_path, quiet_logging, capsys):
    out = tmp_path / "out.jsonl"
    words = ["sampler.temperature=0", "sampler.max_tokens=1", "sampler.min_tokens=1", "sampler.logprobs=-1"]
    main(["generate", f"model.path={folders['chain']}", *SMALL, *words, "sampler.logprobs_mode=processed_logprobs",
          "prompt=w2", f"output={out}"])  # fmt: skip
    (line,) = out.read_text().splitlines()
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["logprobs"][0][str(EOS)] is None
    assert [i for i, value in found["logprobs"][0].items() if value is None] == [str(EOS)]
    assert found["cumulative_logprob"] == pytest.approx(-math.log(VOCAB - 1), abs=1e-5)


# ------------------------------------------------------------------------------------------------------ prompt logprobs


def test_prompts_are_told_as_the_model_sees_them_in_every_mode(running, table):
    """No stage runs on a prompt: nothing of it is drawn."""
    mode, llm = running
    p = SamplingParams(temperature=0.5, top_k=2, seed=1, min_tokens=9, max_tokens=16, prompt_logprobs=3, logprobs=0)
    prompts = [PROMPT, PROMPT[:5], PROMPT[::-1], [7], PROMPT[2:]]
    outputs = llm.generate(prompts, p, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for before, token, entry in zip(prompt, prompt[1:], output.prompt_logprobs[1:], strict=False):
            exact = table[before] if mode.endswith("logits") else table[before].log_softmax(-1)
            assert set(entry) == {token, *exact.topk(3).indices.tolist()}
            for i, one in entry.items():
                assert one.logprob == pytest.approx(exact[i].item(), abs=5e-5)
                assert one.rank == 1 + int((exact > exact[i]).sum())


# ----------------------------------------------------------------------------------------------------------- listed ids


def test_listed_ids_alone_are_told_beside_the_sampled_token(engine, table):
    p = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprob_token_ids=[22, 5, 5])
    (output,) = engine("raw_logprobs").generate([PROMPT], p, use_tqdm=False)
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert set(entry) == {token, 5, 22}
        assert entry[5].decoded_token == "w5"
    check(output.outputs[0], PROMPT[-1], "raw_logprobs", p, table)


def test_listed_ids_concern_what_is_generated_and_not_the_prompt(engine):
    p = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprob_token_ids=[22])
    (output,) = engine("raw_logprobs").generate([PROMPT], p, use_tqdm=False)
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[i] for i in PROMPT[1:]]


def test_listed_id_outside_the_vocabulary_is_refused_and_nothing_has_run(engine):
    llm = engine("raw_logprobs")
    before = llm.engine.stats()
    wrong = SamplingParams(logprob_token_ids=[1, VOCAB])
    with pytest.raises(ValueError, match=r"prompt 1: logprob_token_ids holds 24, outside the vocabulary 0\.\.23"):
        llm.generate([[4], [5]], [SamplingParams(), wrong])
    assert llm.engine.stats() == before


# ------------------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize("kind", ["final", "cumulative", "delta"])
@pytest.mark.parametrize("run", ["sync", "async"])
def test_case_c9_text_ids_logprobs_and_deltas_end_at_the_token_that_completes_a_stop_string(engine, run, kind):
    """CASES C9 as far as one token a step goes: steps in flight have drawn more by then."""
    llm = engine("processed_logprobs", *RUNS[run], model="chain")
    p = SamplingParams(temperature=0, max_tokens=12, stop="w7", logprobs=2, logprob_token_ids=[9], output_kind=kind)
    llm.engine.add_request("s", [4], p)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    last = outputs[-1].outputs[0]
    parts = [o.outputs[0] for o in outputs] if kind == "delta" else [last]
    assert "".join(part.text for part in parts) == "w5 w6 "
    assert [i for part in parts for i in part.token_ids] == [5, 6, 7]
    entries = [entry for part in parts for entry in part.logprobs]
    assert [set(entry) for entry in entries] == [{5, 0, 9}, {6, 0, 9}, {7, 0, 9}]
    sampled = [entry[i].logprob for entry, i in zip(entries, (5, 6, 7), strict=True)]
    assert last.cumulative_logprob == pytest.approx(sum(sampled), abs=1e-6)
    assert (last.finish_reason, last.stop_reason) == ("stop", "w7")
