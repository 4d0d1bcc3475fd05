"""Logprobs of prompts: log-softmax of the model's own logits, whatever chunk a token stands in."""

import pytest
import torch

from framework import LLM, SamplingParams

VOCAB = 24
PROMPT = [4, 9, 1, 17, 3, 3, 20, 8, 5, 11, 2, 6, 19]


@pytest.fixture(scope="module")
def exact():
    """[V, V] the logprobs that the model `mixed` has, in float64."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    return table.double().log_softmax(-1)


def check(found, prompt, k, exact):
    assert len(found) == len(prompt) and found[0] is None
    for before, token, entry in zip(prompt, prompt[1:], found[1:], strict=False):
        row = exact[before]
        order = row.argsort(descending=True).tolist()
        assert set(entry) == {token, *order[: VOCAB if k < 0 else k]}
        for i, one in entry.items():
            assert one.logprob == pytest.approx(row[i].item(), abs=2e-5)
            assert one.rank == order.index(i) + 1


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB, -1])
def test_entries_are_the_k_best_and_the_prompts_own_token(mixed, exact, k):
    (output,) = mixed.generate([PROMPT], SamplingParams(max_tokens=2, prompt_logprobs=k))
    check(output.prompt_logprobs, PROMPT, k, exact)
    assert output.outputs[0].logprobs is None


def test_first_entry_is_none_and_of_one_token_there_is_no_other(mixed):
    (output,) = mixed.generate([4], SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert list(output.prompt_logprobs) == [None] and output.prompt_logprobs == [None]


def test_who_does_not_ask_has_none(mixed):
    (output,) = mixed.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=2))
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("budget", [1, 2, 5, 6, 13, 64])
def test_chunks_and_neighbours_change_nothing(folders, exact, budget):
    words = ["engine.dtype=float32", "engine.max_model_len=64", f"scheduler.max_num_batched_tokens={budget}",
             "kv_cache.num_blocks=64"]  # fmt: skip
    prompts = [PROMPT, [7, 7, 8], PROMPT[::-1], [5]]
    each = [SamplingParams(max_tokens=4, prompt_logprobs=k, logprobs=k) for k in (2, None, 0, 3)]
    with LLM(folders["mixed"], overrides=words) as llm:
        outputs = llm.generate(prompts, each, use_tqdm=False)
    for prompt, params, output in zip(prompts, each, outputs, strict=True):
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(output.prompt_logprobs, prompt, params.prompt_logprobs, exact)
            assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


def test_request_that_asks_takes_nothing_from_the_cache_and_leaves_its_blocks_there(mixed, exact):
    prompt = PROMPT * 3
    for expected in (0, 0):
        (output,) = mixed.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert output.num_cached_tokens == expected
        check(output.prompt_logprobs, prompt, 1, exact)
    (output,) = mixed.generate([prompt], SamplingParams(max_tokens=1))
    assert output.num_cached_tokens == 32


def test_every_streamed_output_has_them(mixed, exact):
    mixed.engine.add_request(
        "s", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1, output_kind="delta")
    )
    outputs = []
    while mixed.engine.has_unfinished_requests():
        outputs += mixed.engine.step()
    assert len(outputs) == 3
    for output in outputs:
        check(output.prompt_logprobs, PROMPT, 1, exact)


def test_preemption_changes_nothing(folders, exact):
    words = ["engine.dtype=float32", "engine.max_model_len=32", "kv_cache.block_size=4", "kv_cache.num_blocks=9"]
    prompts = [PROMPT[:7], PROMPT[3:10]]
    params = SamplingParams(max_tokens=18, ignore_eos=True, seed=3, prompt_logprobs=1)
    with LLM(folders["mixed"], overrides=words) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.stats()["num_preemptions"] > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output.prompt_logprobs, prompt, 1, exact)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_the_vocabulary_is_refused(mixed, name):
    with pytest.raises(ValueError, match=rf"prompt 0: {name}=25 is more than the vocabulary of 24 tokens"):
        mixed.generate([[4]], SamplingParams(**{name: 25}))
