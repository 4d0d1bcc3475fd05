"""What the public surface promises and is not built yet is refused by name, everywhere, and nothing of it is ignored.

Delete an entry here when its part is built, and test the part.
"""

import json

import pytest

from framework import LLM, PoolingParams, SamplingParams
from framework.cli import main
from framework.errors import NotBuiltError

SMALL = ("engine.dtype=float32", "engine.max_model_len=64")

PARAMETERS = {
    "structured_outputs": {"regex": "a+"},
}

WORDS = [
    "kv_cache.dtype=float8_e4m3",
    "spec_decode=ngram",
    "grammar=xgrammar",
    "backend=cuda",
    "backend=tpu",
    "server.port=8000",
    "server.host=localhost",
    "+sampler/stage=grammar",
]

COMMANDS = [
    *([run] for run in ("new", "serve", "replay")),
]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_is_refused_at_admission_and_nothing_has_run(chain, name):
    before = chain.engine.stats()
    with pytest.raises(NotBuiltError, match=rf"prompt 1: SamplingParams\.{name}=.* is not built yet"):
        chain.generate([[4], [5]], [SamplingParams(), SamplingParams(**{name: PARAMETERS[name]})])
    assert chain.engine.stats() == before


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_is_refused_as_a_configured_default(folders, name):
    written = json.dumps(PARAMETERS[name]).replace('"', "").replace(": ", ":")
    with pytest.raises(NotBuiltError, match=rf"sampler\.{name}=.* is not built yet"):
        LLM(folders["chain"], overrides=[*SMALL, f"sampler.{name}={written}"])


def test_every_sampling_parameter_is_either_served_or_in_the_list_above():
    served = {"n", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop",
              "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs", "prompt_logprobs",
              "logprob_token_ids", "detokenize", "skip_special_tokens", "output_kind", "stages",
              "extra_args", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
              "allowed_token_ids", "bad_words", "bad_words_token_ids"}  # fmt: skip
    assert served | set(PARAMETERS) == set(SamplingParams.defaults())


def test_parameters_of_a_prompts_file_are_refused_with_their_line(folders, capsys, tmp_path, quiet_logging):
    lines = [{"prompt": "w4"}, *({"prompt": "w4", name: value} for name, value in PARAMETERS.items())]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit) as end:
        main(["generate", f"model.path={folders['chain']}", *SMALL, f"prompts_file={file}"])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    for number, name in enumerate(PARAMETERS, start=2):
        assert f"prompts_file line {number}: SamplingParams.{name}=" in err
    assert out.count("w4") == 1


@pytest.mark.parametrize("word", WORDS)
def test_word_is_refused_by_llm_and_by_the_command_line(folders, capsys, quiet_logging, word):
    key = word.lstrip("+")
    name = "backend" if key.startswith("backend") else key.partition("=")[0]
    with pytest.raises(NotBuiltError, match=rf"{name}.* is not built yet"):
        LLM(folders["chain"], overrides=[*SMALL, word])
    with pytest.raises(SystemExit) as end:
        main(["generate", f"model.path={folders['chain']}", *SMALL, "prompt=w4", word])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and name in errors[0] and "not built yet" in errors[0]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_run_or_text_is_refused_by_the_command_line(folders, capsys, quiet_logging, words):
    with pytest.raises(SystemExit) as end:
        main([*words, f"model.path={folders['chain']}", *SMALL])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert err.startswith("error: ") and "not built yet" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([4], PoolingParams()), "pooling"),
        (lambda llm: llm.engine.add_request("a", [4], PoolingParams()), "pooling"),
        (lambda llm: llm.generate({"prompt_embeds": [[0.0]]}), "prompt_embeds"),
        (lambda llm: llm.generate({"prompt": "w4", "lora": "x"}), "lora"),
    ],
)
def test_call_is_refused_by_name(chain, call, message):
    with pytest.raises(NotBuiltError, match=f"{message}.* is not built yet"):
        call(chain)
    assert not chain.engine.has_unfinished_requests()
