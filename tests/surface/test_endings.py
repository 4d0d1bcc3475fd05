"""How a request ends, and what its tokens, its text and its reasons hold then."""

import pytest

from framework import LLM, SamplingParams


def run(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, **params), use_tqdm=False)
    assert output.finished and output.error is None
    return output.outputs[0]


def summary(completion):
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


def test_eos_is_the_last_token_and_not_in_the_text(chain):
    assert summary(run(chain, [0])) == ([1, 2, 3], "w2", "stop", None)
    assert run(chain, [0], skip_special_tokens=False).text == "<s> w2"


def test_ignore_eos_concerns_the_eos_of_the_checkpoint_only(chain):
    ignored = run(chain, [0], ignore_eos=True, max_tokens=5, skip_special_tokens=False)
    assert summary(ignored) == ([1, 2, 3, 4, 5], "<s> w2 </s> w4 w5", "length", None)
    stopped = run(chain, [0], ignore_eos=True, max_tokens=5, stop_token_ids=[3])
    assert summary(stopped) == ([1, 2, 3], "w2", "stop", 3)
    assert summary(run(chain, [0], ignore_eos=True, stop_token_ids=[2])) == ([1, 2], "", "stop", 2)


def test_stop_id_is_the_last_token_the_stop_reason_and_not_in_the_text(chain):
    assert summary(run(chain, [4], stop_token_ids=[9, 7])) == ([5, 6, 7], "w5 w6", "stop", 7)


def test_id_that_is_eos_and_stop_id_counts_as_eos(chain):
    assert summary(run(chain, [1], stop_token_ids=[3])) == ([2, 3], "w2", "stop", None)


def test_length_keeps_its_last_token_in_the_text(chain):
    assert summary(run(chain, [4], max_tokens=2)) == ([5, 6], "w5 w6", "length", None)
    assert summary(run(chain, [4], max_tokens=1)) == ([5], "w5", "length", None)


def test_on_one_token_stop_goes_before_length(chain):
    assert summary(run(chain, [4], max_tokens=2, stop_token_ids=[6]))[2:] == ("stop", 6)
    assert summary(run(chain, [1], max_tokens=2))[2:] == ("stop", None)


@pytest.mark.parametrize("max_tokens", [1000, None, 59])
def test_prompt_and_output_together_end_at_max_model_len(chain, max_tokens):
    got = run(chain, [5] * 6, max_tokens=max_tokens, ignore_eos=True)
    assert len(got.token_ids) + 6 == 64
    assert got.finish_reason == "length"


def test_prompt_may_have_one_token_less_than_max_model_len(chain):
    assert summary(run(chain, [5] * 63, max_tokens=9)) == ([6], "w6", "length", None)


def test_generation_config_names_further_eos_ids(folders, tmp_path):
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(folders["chain"], folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    with LLM(folder, overrides=["engine.dtype=float32", "engine.max_model_len=32"]) as llm:
        assert summary(run(llm, [4])) == ([5, 6, 7], "w5 w6", "stop", None)
        assert run(llm, [1]).token_ids == [2, 3]


def test_detokenize_false_gives_no_text_and_the_same_tokens(chain):
    assert summary(run(chain, [4], max_tokens=3, detokenize=False)) == ([5, 6, 7], "", "length", None)


def test_requests_of_one_batch_end_each_in_its_own_way(chain):
    each = [SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=0),
            SamplingParams(temperature=0, stop_token_ids=[9]), SamplingParams(temperature=0, max_tokens=1)]  # fmt: skip
    outputs = [o.outputs[0] for o in chain.generate([[4], [0], [6], [10]], each)]
    assert [(o.finish_reason, o.token_ids) for o in outputs] == [
        ("length", [5, 6]), ("stop", [1, 2, 3]), ("stop", [7, 8, 9]), ("length", [11]),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ stop strings


def stream(llm, prompt, **params):
    """(texts, token ids, last output) of the deltas of one request."""
    llm.engine.add_request("s", prompt, SamplingParams(temperature=0, output_kind="delta", **params))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    return [o.outputs[0].text for o in outputs], [i for o in outputs for i in o.outputs[0].token_ids], outputs[-1]


def assert_all_returned(llm):
    stats = llm.engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "included"),
    [
        ("w7", [5, 6, 7], "w5 w6 ", "w5 w6 w7"),
        ("6 w", [5, 6, 7], "w5 w", "w5 w6 w"),  # across two borders of tokens
        (["w9", "w7"], [5, 6, 7], "w5 w6 ", "w5 w6 w7"),
        (["w1", "w10"], [5, 6, 7, 8, 9, 10], "w5 w6 w7 w8 w9 ", "w5 w6 w7 w8 w9 w10"),
        (["5", "w5"], [5], "", "w5"),
    ],
)
def test_stop_string_ends_the_request_and_the_text(chain, stop, tokens, text, included):
    for include, expected in ((False, text), (True, included)):
        got = run(chain, [4], stop=stop, include_stop_str_in_output=include)
        assert summary(got)[:3] == (tokens, expected, "stop")
        assert got.stop_reason in stop
        pieces, ids, last = stream(chain, [4], stop=stop, include_stop_str_in_output=include)
        assert ("".join(pieces), ids) == (expected, tokens)
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", got.stop_reason)
        assert_all_returned(chain)


def test_no_part_of_a_stop_string_is_streamed(chain):
    pieces, _, _ = stream(chain, [4], stop="w6 w7 w8", max_tokens=8)
    assert pieces == ["w5", " ", "", ""]
    pieces, ids, last = stream(chain, [4], stop="w6 w7 w9", max_tokens=4)  # it never comes whole
    assert ("".join(pieces), len(ids), last.outputs[0].finish_reason) == ("w5 w6 w7 w8", 4, "length")


def test_stop_string_goes_before_length_on_one_token(chain):
    assert summary(run(chain, [4], stop="w6", max_tokens=2)) == ([5, 6], "w5 ", "stop", "w6")


def test_eos_before_the_stop_string_is_whole_gives_the_held_text(chain):
    assert summary(run(chain, [1], stop="w2 w4")) == ([2, 3], "w2", "stop", None)
    pieces, _, _ = stream(chain, [1], stop="w2 w4")
    assert pieces == ["", "w2"]


def test_aborted_request_gives_the_text_that_was_held_back(chain):
    chain.engine.add_request("s", [4], SamplingParams(temperature=0, output_kind="delta", stop="w5 w9"))
    assert [o.outputs[0].text for o in chain.engine.step()] == [""]
    assert chain.engine.abort("s").outputs[0].text == "w5"
    assert_all_returned(chain)


def test_logprobs_end_with_the_token_that_completes_the_stop_string(chain):
    got = run(chain, [4], stop="w7", logprobs=1)
    assert len(got.logprobs) == len(got.token_ids) == 3


def test_request_that_a_stop_string_ended_leaves_the_others_alone(chain):
    each = [SamplingParams(temperature=0, stop="w6", max_tokens=9), SamplingParams(temperature=0, max_tokens=9)]
    outputs = chain.generate([[4], [5]], each)
    assert [o.outputs[0].token_ids for o in outputs] == [[5, 6], [6, 7, 8, 9, 10, 11, 12, 13, 14]]
    assert_all_returned(chain)


def test_stop_strings_of_a_model_without_a_tokenizer_are_refused(folders):
    with (
        LLM(folders["bare"], overrides=["engine.dtype=float32", "engine.max_model_len=32"]) as llm,
        pytest.raises(ValueError, match=r"stop=\['x'\] needs text, and the model has no tokenizer; use stop_token_ids"),
    ):
        llm.generate([[4]], SamplingParams(stop="x"))


# -------------------------------------------------------------------------------------------------------- min_tokens


def test_min_tokens_masks_eos_until_so_many_tokens_are_there(chain):
    assert run(chain, [2]).token_ids == [3]
    # token 3, eos, is masked: of the others, which are equal, the lowest id
    assert run(chain, [2], min_tokens=1, max_tokens=1).token_ids == [0]
    assert run(chain, [1], min_tokens=1).token_ids == [2, 3]
    assert run(chain, [1], min_tokens=2, max_tokens=3, logprobs=0).token_ids == [2, 0, 1]


def test_min_tokens_masks_every_stop_id(chain):
    stops = [5, 7, 9]
    got = run(chain, [4], min_tokens=3, max_tokens=9, stop_token_ids=stops)
    assert not set(got.token_ids[:3]) & {3, *stops} and got.token_ids[-1] in (3, *stops)
    assert run(chain, [4], min_tokens=1, max_tokens=2, stop_token_ids=list(range(1, 24))).token_ids == [0, 1]


def test_min_tokens_passes_over_stop_strings_that_are_whole_by_then(chain):
    assert run(chain, [4], stop="w6").token_ids == [5, 6]
    got = run(chain, [4], stop=["w6", "w8"], min_tokens=2)
    assert summary(got) == ([5, 6, 7, 8], "w5 w6 w7 ", "stop", "w8")
    assert summary(run(chain, [4], stop="6 w7", min_tokens=2))[1:] == ("w5 w", "stop", "6 w7")


def test_min_tokens_holds_for_greedy_pipelines_and_drawn_rows(folders, mixed):
    with LLM(folders["chain"], overrides=["engine.dtype=float32", "engine.max_model_len=32", "sampler=greedy"]) as llm:
        assert run(llm, [2], min_tokens=1, max_tokens=1).token_ids == [0]
    each = [SamplingParams(temperature=5.0, min_tokens=8, max_tokens=9, seed=seed) for seed in range(40)]
    for output in mixed.generate([[4]] * 40, each, use_tqdm=False):
        assert 3 not in output.outputs[0].token_ids[:8]
    plain = [SamplingParams(temperature=5.0, max_tokens=9, seed=seed) for seed in range(40)]
    assert any(3 in o.outputs[0].token_ids[:8] for o in mixed.generate([[4]] * 40, plain, use_tqdm=False))


def test_min_tokens_cannot_be_switched_off(chain):
    with pytest.raises(ValueError, match="stages cannot switch 'min_tokens' off"):
        chain.generate([[4]], SamplingParams(min_tokens=1, stages={"min_tokens": False}))


def test_pipeline_without_the_stage_refuses_min_tokens(folders):
    words = ["engine.dtype=float32", "engine.max_model_len=32", "sampler.stages.min_tokens=null"]
    with (
        LLM(folders["chain"], overrides=words) as llm,
        pytest.raises(ValueError, match=r"no stage that reads min_tokens=2"),
    ):
        llm.generate([[4]], SamplingParams(min_tokens=2))


def test_preemption_leaves_min_tokens_and_stop_strings_as_they_are(folders):
    words = ["engine.dtype=float32", "engine.max_model_len=32", "kv_cache.block_size=4", "kv_cache.num_blocks=9"]
    each = [SamplingParams(temperature=0, min_tokens=12, max_tokens=20, stop="w22 w23"),
            SamplingParams(temperature=0, min_tokens=12, max_tokens=20, ignore_eos=True)]  # fmt: skip
    quiet, tight = [], []
    with LLM(folders["chain"], overrides=words) as llm:
        for prompt, params in zip([[6], [7]], each, strict=True):
            quiet += [summary(o.outputs[0]) for o in llm.generate([prompt], params, use_tqdm=False)]
        tight = [summary(o.outputs[0]) for o in llm.generate([[6], [7]], each, use_tqdm=False)]
        assert llm.engine.stats()["num_preemptions"] > 0
        assert_all_returned(llm)
    assert tight == quiet
