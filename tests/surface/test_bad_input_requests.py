"""Wrong requests at a running engine: refused by name, and those that run beside them get the tokens they get alone.

After each of them every block is back in the pool. Forms that `LLM.generate` refuses stand in `test_prompts.py`.
"""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from framework import LLM, PoolingParams, SamplingParams
from framework.errors import FrameworkError, RequestError
from framework.testing.crafted import save_crafted

POISON = 20  # the logits that follow it are not numbers
WORDS = ["engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=4", "scheduler.max_num_seqs=4"]
NEIGHBOURS = {"a": [4], "b": [9] * 17}
LONG = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request, tmp_path_factory):
    """Greedy goes from t to t + 1; a pool of three blocks of 16 for prompts of up to 63 tokens; no tokenizer."""
    folder = save_crafted(tmp_path_factory.mktemp("poisoned"), torch.eye(24).roll(1, 1) * 8, eos_token_id=3)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan  # what is computed from it is no number, its KV neither
    save_file(weights, folder / "model.safetensors")
    with LLM(str(folder), overrides=[*WORDS, f"engine.async_scheduling={request.param}"]) as llm:
        yield llm


def drained(engine):
    """{request id: its last output}; a bound on the steps stands for a clock."""
    last = {}
    for _ in range(500):
        if not engine.has_unfinished_requests():
            break
        last.update({output.request_id: output for output in engine.step()})
    assert not engine.has_unfinished_requests()
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    return last


@pytest.fixture
def running(llm):
    """The engine with two requests in the middle of their tokens; afterwards they must have those they get alone."""
    for request_id, prompt in NEIGHBOURS.items():
        llm.engine.add_request(request_id, prompt, LONG)
    for _ in range(3):
        llm.engine.step()
    yield llm.engine
    last = drained(llm.engine)
    assert {i: last[i].outputs[0].token_ids for i in NEIGHBOURS} == {"a": [*range(5, 15)], "b": [*range(10, 20)]}
    assert all(last[i].error is None for i in NEIGHBOURS)


NAN, INF = math.nan, math.inf
PROMPTS = {
    "nothing": (None, TypeError, "a prompt must be a string, a list of token ids or a dict, got NoneType"),
    "a number": (7, TypeError, "a prompt must be a string, a list of token ids or a dict, got int"),
    "no tokens": ([], RequestError, "the prompt is empty; give at least one token"),
    "id outside the vocabulary": ([4, 24], RequestError, r"prompt_token_ids\[1\] is 24, outside the vocabulary 0\.\.2"),
    "id below zero": ([-1], RequestError, r"prompt_token_ids\[0\] is -1, outside the vocabulary"),
    "id beyond 64 bits": ([2**70], RequestError, r"prompt_token_ids\[0\] is 1180591620717411303424, outside the vocab"),
    "switch for an id": ([4, True], TypeError, r"prompt_token_ids\[1\] must be an integer, got True"),
    "NaN for an id": ([NAN], TypeError, r"prompt_token_ids\[0\] must be an integer, got nan"),
    "array of floats": (np.array([4.0]), TypeError, r"prompt_token_ids\[0\] must be an integer, got 4\.0"),
    "text without a tokenizer": ("w4", RequestError, "the model has no tokenizer.*pass prompt_token_ids"),
    "unknown key": ({"prompt_token_ids": [4], "salt": "x"}, RequestError, "a prompt dict has no key 'salt'. Known: pr"),
    "two prompts": ({"prompt": "a", "prompt_token_ids": [4]}, RequestError, "exactly one of prompt, prompt_token_ids"),
    "no prompt": ({"cache_salt": "x"}, RequestError, "exactly one of prompt, prompt_token_ids; got none"),
    "salt that is a number": ({"prompt_token_ids": [4], "cache_salt": 5}, RequestError, "non-empty string, got 5"),
    "priority without its policy": ({"prompt_token_ids": [4], "priority": 1}, RequestError, "needs policy=priority, b"),
    "priority that is NaN": ({"prompt_token_ids": [4], "priority": NAN}, TypeError, "priority must be an integer, got"),
    "as long as max_model_len": ([4] * 64, RequestError, "the prompt has 64 tokens but engine.max_model_len is 64"),
    "larger than the pool": ([4] * 50, RequestError, "prompt and max_tokens are 60 tokens and need 4 b"),
    "embeddings": ({"prompt_embeds": [[0.0]]}, FrameworkError, "prompt_embeds is not built yet; leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_wrong_prompt_is_refused_and_the_requests_that_run_go_on(running, name):
    prompt, kind, message = PROMPTS[name]
    before = running.stats()
    with pytest.raises(kind, match=message) as caught:
        running.add_request("bad", prompt, LONG)
    assert "\n" not in str(caught.value)
    assert running.stats() == before


PARAMS = {
    "no parameters": ({"temperature": 0}, TypeError, "sampling_params must be a SamplingParams, got dict"),
    "of another kind": (PoolingParams(), FrameworkError, "pooling is not built yet; pass SamplingParams"),
    "stop id outside the vocabulary": (LONG.replace(stop_token_ids=[24]), RequestError, "stop_token_ids holds 24, out"),
    "more logprobs than tokens": (LONG.replace(logprobs=25), RequestError, "logprobs=25 is more than the vocabulary o"),
    "more prompt logprobs": (LONG.replace(prompt_logprobs=25), RequestError, "prompt_logprobs=25 is more than the voc"),
    "stop string without a tokenizer": (LONG.replace(stop="x"), RequestError, r"stop=\['x'\] needs text.*stop_token_i"),
    "unknown stage": (LONG.replace(stages={"topp": False}), RequestError, "stages names 'topp'.*Did you mean 'top_p'"),
    "stage that draws, off": (LONG.replace(stages={"gumbel": False}), RequestError, "cannot switch 'gumbel' off"),
    "stage off that is used": (SamplingParams(top_p=0.5, stages={"top_p": False}), RequestError, "Leave out one of th"),
    "parameter of no stage": (LONG.replace(extra_args={"top_p": {"x": 1}}), RequestError, r"extra_args\.top_p has no"),
    "more output than the pool": (LONG.replace(max_tokens=63), RequestError, "need 4 blocks, but the pool has 3"),
    "no limit but the model's": (LONG.replace(max_tokens=None), RequestError, "3. Raise .* or set max_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
def test_wrong_parameters_are_refused_and_the_requests_that_run_go_on(running, name):
    params, kind, message = PARAMS[name]
    before = running.stats()
    with pytest.raises(kind, match=message) as caught:
        running.add_request("bad", [4], params)
    assert "\n" not in str(caught.value)
    assert running.stats() == before


@pytest.mark.parametrize(
    ("request_id", "message"),
    [
        ("a", "request_id 'a' is already running; give"),
        ("", "got ''"),
        (5, "got 5"),
        (None, "got None"),
        ([], r"got \["),
    ],
)
def test_wrong_request_id_is_refused_and_the_requests_that_run_go_on(running, request_id, message):
    with pytest.raises(RequestError, match=message):
        running.add_request(request_id, [4], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("request_id", ["nobody", "", 5, None, [], NAN])
def test_abort_of_an_id_that_does_not_run_does_nothing(running, request_id):
    assert running.abort(request_id) is None


@pytest.mark.parametrize("prompt", [[POISON], [4, POISON], [POISON - 2]])
def test_logits_that_are_not_numbers_end_their_request_alone(running, prompt):
    running.add_request("bad", prompt, SamplingParams(temperature=0, max_tokens=8))
    (bad,) = [output for output in steps(running) if output.request_id == "bad"]
    assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")
    assert bad.error == "the model's logits are not numbers"
    assert bad.outputs[0].token_ids == list(range(prompt[-1] + 1, POISON + 1))


def steps(engine):
    """Outputs up to that of `bad`; the neighbours are still to end."""
    for _ in range(100):
        outputs = engine.step()
        engine.put_back([output for output in outputs if output.request_id != "bad"])
        found = [output for output in outputs if output.request_id == "bad"]
        if found:
            return found
    return []


def test_a_list_with_one_wrong_prompt_runs_nothing_and_the_next_list_runs(llm):
    before = llm.engine.stats()
    for name, (prompt, kind, message) in PROMPTS.items():
        with pytest.raises(kind, match=f"prompt 1: .*{message}"):
            llm.generate([[4], prompt], LONG, use_tqdm=False)
        assert llm.engine.stats() == before, name
    assert llm.generate([4], LONG, use_tqdm=False)[0].outputs[0].token_ids == [*range(5, 15)]
    drained(llm.engine)


def test_text_of_another_models_tokenizer_is_refused_before_it_runs(folders, tmp_path):
    table = torch.eye(8).roll(1, 1) * 8
    folder = save_crafted(tmp_path / "small", table)
    with LLM(str(folder), overrides=["engine.dtype=float32", f"model.tokenizer={folders['chain']}"]) as llm:
        for call in (
            lambda: llm.generate(["w2", "w9"], LONG), lambda: llm.chat([{"role": "user", "content": "w2"}], LONG)
        ):  # fmt: skip
            with pytest.raises(RequestError, match=r"the tokenizer gives id 9, outside the model's vocabulary 0\.\.7"):
                call()
        assert llm.generate("w4", LONG)[0].outputs[0].token_ids[:3] == [5, 6, 7]
        drained(llm.engine)
