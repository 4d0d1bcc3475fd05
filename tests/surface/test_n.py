"""n > 1: several completions of one prompt, put together in one output."""

import pytest

from framework import LLM, SamplingParams
from framework.rng import child_seed

SMALL = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=8", "kv_cache.block_size=4",
         "kv_cache.num_blocks=129"]  # fmt: skip
PROMPT = [4, 9, 17, 20, 8, 5, 11, 2, 6, 19]
WARM = {"temperature": 2.0, "max_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(folders["mixed"], overrides=SMALL) as made:
        yield made


def completions(llm, prompt=PROMPT, **params):
    (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    assert output.finished and [c.index for c in output.outputs] == list(range(params.get("n", 1)))
    assert_all_returned(llm)
    return output.outputs


def assert_all_returned(llm):
    stats = llm.engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
    assert not llm.engine.has_unfinished_requests()


def streamed(llm, name="s"):
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += [o for o in llm.engine.step() if o.request_id == name]
    return outputs


def test_child_i_has_the_seed_of_its_index_and_index_0_equals_the_run_of_one(llm):
    many = completions(llm, n=5, seed=11, **WARM)
    alone = [completions(llm, seed=child_seed(11, i), **WARM)[0] for i in range(5)]
    assert [c.token_ids for c in many] == [c.token_ids for c in alone]
    assert many[0].token_ids == completions(llm, seed=11, **WARM)[0].token_ids
    assert len({tuple(c.token_ids) for c in many}) == 5


def test_greedy_completions_are_equal(llm):
    many = completions(llm, n=3, temperature=0, max_tokens=6)
    assert many[0].token_ids == many[1].token_ids == many[2].token_ids
    assert many[0].text == many[2].text != ""


@pytest.mark.parametrize(
    "words",
    [[], ["kv_cache.prefix_caching=false"], ["scheduler.max_num_seqs=1"], ["scheduler.max_num_seqs=2"],
     ["scheduler.max_num_batched_tokens=3"], ["kv_cache.num_blocks=9"], ["engine.async_scheduling=true"],
     ["engine.async_scheduling=true", "kv_cache.num_blocks=9", "kv_cache.prefix_caching=false"],
     ["kv_cache.num_blocks=9", "scheduler.preemption=swap"]],
    ids=" ".join,
)  # fmt: skip
def test_completions_are_the_same_however_they_are_scheduled(folders, llm, words):
    prompts = [PROMPT, PROMPT[:4], [7]]
    params = [SamplingParams(n=n, seed=3, logprobs=1, **WARM) for n in (4, 3, 2)]
    expected = [
        completions(llm, prompt, n=p.n, seed=3, logprobs=1, **WARM) for prompt, p in zip(prompts, params, strict=True)
    ]
    with LLM(folders["mixed"], overrides=[*SMALL, *words]) as other:
        outputs = other.generate(prompts, params, use_tqdm=False)
        assert_all_returned(other)
    for output, those in zip(outputs, expected, strict=True):
        assert [(c.token_ids, c.text, c.finish_reason) for c in output.outputs] == [
            (c.token_ids, c.text, c.finish_reason) for c in those
        ]
        assert [c.cumulative_logprob for c in output.outputs] == pytest.approx(
            [c.cumulative_logprob for c in those], abs=1e-4
        )


def test_prompt_is_computed_once(folders):
    for caching in ("true", "false"):
        with LLM(folders["mixed"], overrides=[*SMALL, f"kv_cache.prefix_caching={caching}"]) as llm:
            completions(llm, n=4, **WARM)
            assert llm.engine.stats()["prefill_tokens"] == len(PROMPT) + 3


def test_every_completion_ends_in_its_own_way(llm):
    many = completions(llm, n=8, seed=2, temperature=2.0, max_tokens=12, stop=["w5", "w9"], stop_token_ids=[7])
    assert {c.finish_reason for c in many} == {"stop", "length"}
    for one in many:
        if one.finish_reason == "length":
            assert len(one.token_ids) == 12
        elif isinstance(one.stop_reason, str):
            assert one.text.endswith(" ") or one.text == ""
            assert f"w{one.token_ids[-1]}".startswith(one.stop_reason)
        else:
            assert one.token_ids[-1] == (one.stop_reason or 3)
    assert len({c.stop_reason for c in many}) > 2


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_streamed_outputs_hold_all_completions_and_add_up(llm, kind):
    params = {"n": 4, "seed": 5, "temperature": 2.0, "max_tokens": 9, "stop": ["w5"], "logprobs": 0}
    whole = completions(llm, **params)
    llm.engine.add_request("s", PROMPT, SamplingParams(output_kind=kind, **params))
    outputs = streamed(llm)
    assert all([c.index for c in o.outputs] == [0, 1, 2, 3] for o in outputs)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for i, expected in enumerate(whole):
        parts = [o.outputs[i] for o in outputs]
        if kind == "delta":
            assert "".join(p.text for p in parts) == expected.text
            assert [t for p in parts for t in p.token_ids] == expected.token_ids
            assert [e for p in parts for e in p.logprobs] == list(expected.logprobs)
        else:
            assert all(expected.text.startswith(p.text) for p in parts)
            assert (parts[-1].text, parts[-1].token_ids) == (expected.text, expected.token_ids)
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert_all_returned(llm)


def test_a_step_gives_one_output_a_request(llm):
    llm.engine.add_request("s", PROMPT, SamplingParams(n=4, output_kind="delta", **WARM))
    llm.engine.add_request("t", PROMPT, SamplingParams(n=2, output_kind="delta", **WARM))
    while llm.engine.has_unfinished_requests():
        ids = [o.request_id for o in llm.engine.step()]
        assert len(set(ids)) == len(ids)


def test_abort_ends_all_completions_and_keeps_what_they_have(llm):
    llm.engine.add_request("s", PROMPT, SamplingParams(n=3, **WARM))
    llm.engine.add_request("t", PROMPT, SamplingParams(n=2, seed=1, **WARM))
    for _ in range(3):
        llm.engine.step()
    output = llm.engine.abort("s")
    assert output.finished and [c.finish_reason for c in output.outputs] == ["abort"] * 3
    assert [len(c.token_ids) for c in output.outputs] == [3, 2, 2]
    (other,) = streamed(llm, "t")
    assert [c.token_ids for c in other.outputs] == [c.token_ids for c in completions(llm, n=2, seed=1, **WARM)]


def test_abort_after_some_have_ended_leaves_their_reasons(llm):
    params = SamplingParams(n=8, seed=2, temperature=2.0, max_tokens=12, stop_token_ids=[5, 7, 9], stop=["w11"])
    llm.engine.add_request("s", PROMPT, params)
    for _ in range(5):
        llm.engine.step()
    reasons = [c.finish_reason for c in llm.engine.abort("s").outputs]
    assert set(reasons) == {"stop", "abort"}
    assert_all_returned(llm)


def test_prompt_logprobs_come_once_for_all(llm):
    (output,) = llm.generate([PROMPT], SamplingParams(n=3, prompt_logprobs=1, **WARM), use_tqdm=False)
    (alone,) = llm.generate([PROMPT], SamplingParams(prompt_logprobs=1, **WARM), use_tqdm=False)
    assert output.prompt_logprobs == alone.prompt_logprobs and len(output.prompt_logprobs) == len(PROMPT)
    assert output.num_cached_tokens == 0


def test_metrics_span_the_first_token_of_any_and_the_end_of_the_last(llm):
    (output,) = llm.generate([PROMPT], SamplingParams(n=3, **WARM), use_tqdm=False)
    m = output.metrics
    assert 0 < m.ttft <= m.e2e and m.queue_time >= 0
    assert m.ttft <= m.e2e - m.tpot
    lengths = [len(c.token_ids) for c in output.outputs]
    assert len(m.itl) == sum(lengths) - 3 and m.tpot == pytest.approx(sum(m.itl) / len(m.itl))  # all of one length
    assert len(set(lengths)) == 1


def test_cached_tokens_are_the_value_of_the_first(folders):
    with LLM(folders["mixed"], overrides=SMALL) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
        (output,) = llm.generate([PROMPT], SamplingParams(n=3, **WARM), use_tqdm=False)
        assert output.num_cached_tokens == 8
        assert llm.engine.stats()["prefix_hit_tokens"] == 8


@pytest.mark.parametrize("names", [("s/1", "s"), ("s", "s/1"), ("s", "s1")])
def test_no_id_of_a_caller_is_that_of_a_sibling(llm, names):
    for name in names:
        llm.engine.add_request(name, PROMPT, SamplingParams(n=2, seed=4, **WARM))
    assert llm.engine.abort("s/1" if "s/1" in names else "s1").finished
    (output,) = streamed(llm)
    assert [c.finish_reason for c in output.outputs] == ["length", "length"]
    assert_all_returned(llm)


@pytest.mark.parametrize("name", ["s\x1f1", "\x1f"])
def test_id_that_could_be_that_of_a_sibling_is_refused(llm, name):
    llm.engine.add_request("s", PROMPT, SamplingParams(n=2, **WARM))
    with pytest.raises(ValueError, match=r"request_id must not hold the character '\\x1f', got .*; leave it out"):
        llm.engine.add_request(name, PROMPT)
    (output,) = streamed(llm)
    assert [c.finish_reason for c in output.outputs] == ["length", "length"]
    assert_all_returned(llm)


def test_n_as_a_configured_default(folders):
    with LLM(folders["mixed"], overrides=[*SMALL, "sampler.n=2", "sampler.max_tokens=2"]) as llm:
        (output,) = llm.generate([PROMPT], use_tqdm=False)
        assert len(output.outputs) == 2


def test_more_completions_than_128_are_refused():
    with pytest.raises(ValueError, match=r"SamplingParams\.n must be in 1\.\.128, got 129"):
        SamplingParams(n=129)
