"""Keys of the configuration that act on a running engine, and where an LLM may be built."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from framework import LLM, AsyncLLM, SamplingParams
from framework.config import Config, EngineOptions, ModelConfig, compose
from framework.errors import CheckpointError, ConfigError, FrameworkError, PluginError, RequestError
from framework.testing.crafted import save_crafted

GREEDY = SamplingParams(temperature=0, max_tokens=3)
SMALL = ("engine.dtype=float32", "engine.max_model_len=64")


def tokens(llm, prompts, params=GREEDY):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "words",
    [
        ["backend=cpu", "sampler=gumbel", "scheduler.max_num_seqs=16"],
        ["+backend=cpu", "+sampler=greedy", "+policy=shortest"],
        ["engine.dtype=bfloat16"],
        ["kv_cache.block_size=5"],
        ["kv_cache.memory_fraction=0.01"],
        ["scheduler.max_num_batched_tokens=2", "scheduler.max_num_seqs=8"],
        ["engine.graphs=off", "engine.batch_invariant=true", "attention=cpu", "model=llama"],
        ["engine.load_format=safetensors", "executor=inprocess", "scheduler=default"],
    ],
)
def test_words_with_or_without_a_plus_build_an_engine_that_gives_the_same_tokens(folders, words):
    with LLM(folders["chain"], overrides=[*SMALL, *words]) as llm:
        assert tokens(llm, [[4], [5] * 9, [6]]) == [[5, 6, 7], [6, 7, 8], [7, 8, 9]]


def test_model_path_may_stand_in_the_overrides_or_in_a_config(folders):
    path = str(folders["chain"])
    config = Config(model=ModelConfig(path=path), engine=EngineOptions(dtype="float32", max_model_len=32),
                    sampler=compose([]).sampler)  # fmt: skip
    for llm in (LLM(overrides=[f"model.path={path}", *SMALL]), LLM(config=config)):
        with llm:
            assert tokens(llm, [[4]]) == [[5, 6, 7]]
    with pytest.raises(ValueError, match="pass config alone"):
        LLM(path, config=config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 5}, r"config must be a framework\.config\.Config, got 5"),
        ({"config": ["backend=cpu"]}, r"config must be .*; words go into overrides"),
        ({"overrides": None}, "overrides must be a list of words, got None"),
        ({"overrides": "backend=cpu"}, "overrides must be a list of words, got 'backend=cpu'"),
    ],
)
def test_argument_of_a_wrong_type_is_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        LLM(**arguments)


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_model_that_is_named_twice_is_refused_with_both(folders, sign):
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match=r"model='.*chain' and overrides with '\+*model\.path=/x' both name"):
            kind(folders["chain"], overrides=[f"{sign}model.path=/x"])


def test_pool_that_wants_more_memory_than_there_is_is_refused_with_the_way_out(folders):
    text = r"kv_cache\.num_blocks=1000000000000 wants [\d,.]+ GB, and [\d,.]+ GB are free\. Use \d+ or less"
    with pytest.raises(ConfigError, match=text):
        LLM(folders["chain"], overrides=[*SMALL, "kv_cache.num_blocks=1000000000000"])


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), RuntimeError("can't allocate\nat line 5")])
def test_pool_that_the_system_does_not_give_is_a_config_error(folders, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("framework_backends.cpu.CpuBackend.allocate_kv", fail)
    with pytest.raises(
        ConfigError, match=r"kv_cache\.num_blocks=16 wants 0\.0 GB, which the system does not give \(.*all"
    ):
        LLM(folders["chain"], overrides=[*SMALL, "kv_cache.num_blocks=16"])


def test_weights_that_the_device_has_no_memory_for_are_a_config_error(folders, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB, of which 1.00 GiB is free.\nat line 5")

    monkeypatch.setattr("framework_backends.cpu.CpuBackend.pack_linear", fail)
    text = r"the weights in float32 do not fit into the memory of cpu \(Tried to allocate 2\.00 GiB, of which 1\.00 GiB"
    with pytest.raises(ConfigError, match=text):
        LLM(folders["chain"], overrides=[*SMALL, "engine.dtype=float32"])


def test_pool_may_be_smaller_than_max_model_len(folders):
    with LLM(folders["chain"], overrides=[*SMALL, "kv_cache.num_blocks=3", "kv_cache.block_size=8"]) as llm:
        assert tokens(llm, [[4] * 10, [5] * 12]) == [[5, 6, 7], [6, 7, 8]]
        with pytest.raises(RequestError, match="need 3 blocks, but the pool has 2"):
            llm.generate([4] * 10, SamplingParams(max_tokens=7))
        with pytest.raises(RequestError, match="need 8 blocks, but the pool has 2"):
            llm.generate([4], SamplingParams(max_tokens=None))


def test_pool_of_the_cpu_holds_four_times_max_model_len_and_a_null_block_is_part_of_it(folders):
    with LLM(folders["chain"], overrides=SMALL) as llm:
        assert llm.engine.stats()["num_blocks"] == 4 * 64 // 16
        assert llm.engine.stats()["num_free_blocks"] == 4 * 64 // 16 - 1


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["engine.max_model_len=1"], ConfigError, "engine.max_model_len=1 is too small"),
        (["engine.max_model_len=257"], ConfigError, "more than the 256 positions"),
        (["engine.sed=1"], ConfigError, "Did you mean 'seed'"),
        (["backnd=cpu"], ConfigError, "Did you mean 'backend'"),
        (["sampler=gumbl"], ConfigError, "Did you mean 'gumbel'"),
        (["backend=tpu"], FrameworkError, "backend=tpu"),
        (["engine.load_format=gguf"], FrameworkError, "gguf"),
        (["engine.load_format=nope"], PluginError, "nope"),
        (["scheduler.max_num_seqs=0"], ConfigError, "scheduler.max_num_seqs=0 is too small"),
        (["kv_cache.num_blocks=1"], ConfigError, "kv_cache.num_blocks=1 is too small"),
        (["prompt=x"], ConfigError, "belongs to the command line"),
        (["model=qwen3"], PluginError, "model=qwen3 serves Qwen3ForCausalLM, but"),
    ],
)
def test_wrong_word_is_one_line_that_names_it(folders, words, kind, message):
    with pytest.raises(kind, match=message) as caught:
        LLM(folders["chain"], overrides=words)
    assert "\n" not in str(caught.value)


def test_model_that_is_not_there_or_pickled_is_refused_by_name(folders, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text((folders["chain"] / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        LLM(tmp_path)


# ----------------------------------------------------------------------------------------------- random weights


@pytest.fixture
def config_only(folders, tmp_path):
    header = json.loads((folders["bare"] / "config.json").read_text())
    header |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 200,
               "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(header))
    return tmp_path


def test_dummy_weights_need_a_config_only_and_follow_the_seed(config_only):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    found = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        with LLM(config_only, overrides=[*SMALL, "engine.load_format=dummy", f"engine.seed={seed}"]) as llm:
            (output,) = llm.generate([4, 5, 6], params)
        found[name] = output.outputs[0]
    assert found["first"] == found["again"]
    assert found["first"].token_ids != found["other"].token_ids
    best = [entry[t].logprob for t, entry in zip(found["first"].token_ids, found["first"].logprobs, strict=True)]
    assert sum(best) / len(best) > -2.5  # peaked: the best of 200 equal tokens would have -5.3


def test_folder_without_weights_is_refused_unless_they_are_random(config_only):
    with pytest.raises(CheckpointError):
        LLM(config_only, overrides=SMALL)


# ------------------------------------------------------------------------------------- where an LLM may be built


def test_two_engines_of_one_process_keep_apart(folders):
    with (
        LLM(folders["chain"], overrides=SMALL) as one,
        LLM(folders["mixed"], overrides=[*SMALL, "sampler=greedy"]) as other,
    ):
        assert tokens(one, [[4]]) == [[5, 6, 7]]
        first = tokens(other, [[4]])
        assert tokens(one, [[4]]) == [[5, 6, 7]]
        assert tokens(other, [[4]]) == first != [[5, 6, 7]]
    with LLM(folders["chain"], overrides=SMALL) as again:
        assert tokens(again, [[4]]) == [[5, 6, 7]]


def test_engines_are_built_and_used_in_threads(folders):
    found = {}

    def work(n):
        with LLM(folders["chain"], overrides=[*SMALL, f"scheduler.max_num_seqs={n}"]) as llm:
            found[n] = tokens(llm, [[4], [5], [6]])

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {n: [[5, 6, 7], [6, 7, 8], [7, 8, 9]] for n in (1, 2, 3)}


def test_llm_works_inside_somebody_elses_hydra_program(folders, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("backend: theirs\nengine: 7\n")
    program = f"""
import hydra
from hydra.core.hydra_config import HydraConfig
from framework import LLM, AsyncLLM, SamplingParams

@hydra.main(version_base=None, config_path={str(tmp_path / "conf")!r}, config_name="config")
def main(cfg):
    with LLM({str(folders["chain"])!r}, overrides={list(SMALL)!r}) as llm:
        print(llm.generate([4], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids)
    print(cfg.backend, cfg.engine, HydraConfig.get().job.name)

main()
"""
    (tmp_path / "theirs.py").write_text(program)
    words = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra.job.chdir=false", "backend=mine"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "theirs.py", *words], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["[5, 6, 7]", "mine 7 theirs"]  # their logging may write there too


def test_progress_bar_goes_to_stderr_when_asked_for(folders, capsys):
    with LLM(folders["chain"], overrides=SMALL) as llm:
        llm.generate([[4]] * 3, GREEDY, use_tqdm=False)
        assert capsys.readouterr() == ("", "")
        llm.generate([[4]] * 3, GREEDY, use_tqdm=None)  # no terminal here
        assert capsys.readouterr() == ("", "")
        llm.generate([[4]] * 3, GREEDY, use_tqdm=True)
        out, err = capsys.readouterr()
    assert out == "" and "/3 [" in err


def test_text_of_a_real_tokenizer_comes_back_whole():
    """The packaged default model: text in, text out, in pieces that concatenate to the whole."""
    with LLM(overrides=["engine.max_model_len=64"]) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, output_kind="delta")
        llm.engine.add_request("a", "The capital of France is", params)
        pieces = []
        while llm.engine.has_unfinished_requests():
            pieces += [o.outputs[0].text for o in llm.engine.step()]
        (whole,) = llm.generate("The capital of France is", params.replace(output_kind="final"), use_tqdm=False)
    assert "Paris" in whole.outputs[0].text
    assert "".join(pieces) == whole.outputs[0].text
    assert whole.prompt == "The capital of France is"


def test_crafted_model_of_any_vocabulary_loads(tmp_path):
    import torch

    for vocab in (2, 129):
        table = torch.eye(vocab).roll(1, 1) * 9
        with LLM(save_crafted(tmp_path / str(vocab), table), overrides=["engine.dtype=float32"]) as llm:
            assert tokens(llm, [[0]]) == [[1 % vocab, 2 % vocab, 3 % vocab]]


def test_tokenizer_of_another_folder_can_be_named(folders):
    with LLM(folders["bare"], overrides=[*SMALL, f"model.tokenizer={folders['chain']}"]) as llm:
        (output,) = llm.generate("w4", GREEDY)
    assert output.prompt_token_ids == [1, 4]
    assert output.outputs[0].text.startswith("w")


def test_code_of_a_checkpoint_is_never_trusted(folders):
    with pytest.raises(ConfigError, match="trust_remote_code"):
        LLM(folders["chain"], overrides=["+model.trust_remote_code=true"])
