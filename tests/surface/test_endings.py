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
