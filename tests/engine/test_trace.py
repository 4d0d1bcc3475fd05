"""`trace=FILE` holds every request and every step, and a disk that is full ends the trace and not the engine."""

import json
import logging

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from framework import LLM, SamplingParams
from framework.engine import trace
from framework.engine.output_thread import OutputThread
from framework.engine.trace_format import read_config, read_params
from framework.errors import ConfigError, StageError
from framework.request import Request
from framework.rng import child_seed
from framework.testing.crafted import save_crafted

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4", "kv_cache.block_size=4")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Greedy goes from token t to t + 1, of 24; token t is the word wt."""
    table = 8.0 * torch.eye(24).roll(1, 1)
    folder = save_crafted(tmp_path_factory.mktemp("trace") / "chain", table, eos_token_id=3)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(24)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def traced(folder, tmp_path):
    """Makes an engine that writes a trace: (LLM, function that reads the lines)."""
    made = []

    def make(*words, path=tmp_path / "t.jsonl"):
        llm = LLM(folder, overrides=[*SMALL, *words, f"trace={path}"])
        made.append(llm)
        return llm, lambda: [json.loads(line) for line in path.read_text().splitlines()]

    yield make
    for llm in made:
        llm.close()


def test_every_step_tells_its_rows_tokens_and_ends(traced):
    llm, lines = traced()
    llm.generate([[4, 5], [6, 7, 8]], [SamplingParams(max_tokens=2, **GREEDY), SamplingParams(max_tokens=1, **GREEDY)])
    header, first, second, *steps = lines()
    assert (header["trace"], header["num_blocks"]) == (2, llm.engine.facts["num_blocks"])
    assert [(x["request"], x["num_prompt_tokens"], x["max_total_tokens"]) for x in (first, second)] == [
        ("0", 2, 4), ("1", 3, 4),
    ]  # fmt: skip
    assert [x["rows"] for x in steps] == [[["0", 0, 2, 0, True], ["1", 0, 3, 0, True]], [["0", 2, 1, 0, True]]]
    assert [x["tokens"] for x in steps] == [{"0": [6], "1": [9]}, {"0": [7]}]
    assert [x["finished"] for x in steps] == [{"1": "length"}, {"0": "length"}]
    assert [x["step"] for x in steps] == [0, 1]
    assert steps[0]["t"] <= steps[1]["t"] and steps[0]["seconds"]["forward"] > 0
    assert steps[0]["new_blocks"] == 2


def test_request_tells_all_that_it_is_drawn_from(traced):
    llm, lines = traced("engine.seed=7")
    params = SamplingParams(temperature=0.5, logit_bias={4: -1.5}, stop=["w9"], structured_outputs=None, max_tokens=2)
    llm.generate([{"prompt_token_ids": [4, 5], "cache_salt": "mine"}], params)
    line = lines()[1]
    assert line["params"] == {"temperature": 0.5, "logit_bias": {"4": -1.5}, "stop": ["w9"], "max_tokens": 2}
    assert line["named"] == ["logit_bias", "max_tokens", "stop", "structured_outputs", "temperature"]
    assert (line["prompt_token_ids"], line["cache_salt"], line["arrival"]) == ([4, 5], "mine", 0)
    assert (line["eos_token_ids"], line["seed"]) == ([3], child_seed(7, 1))
    assert read_params(line["params"], line["named"]) == params


def test_parameters_that_json_cannot_hold_are_named_and_end_no_trace(traced):
    llm, lines = traced()
    params = SamplingParams(max_tokens=1, **GREEDY)
    object.__setattr__(params, "extra_args", {"no_repeat_ngram": {"size": {2}}})  # as a stage of its own words may take
    trace.Trace.on_request_added(llm.engine.core.events._joined[0], Request("a", [4], params, 1, 2))
    line = lines()[1]
    assert line["params"] is None and "set is not JSON serializable" in line["unwritten"]


def test_configuration_comes_back_as_it_was(traced):
    llm, lines = traced("sampler.stages.top_k.order=1050", "scheduler.max_num_batched_tokens=6")
    header = lines()[0]
    assert read_config(header["config"]) == llm.engine.config
    assert header["max_num_batched_tokens"] == 6 and header["versions"]["framework"]


def test_step_tells_what_its_runner_was_told(traced):
    llm, lines = traced("kv_cache.num_blocks=9", "scheduler.preemption=swap")
    llm.generate([[4, 5, 6, 7], [8, 9, 10, 11], [8, 9, 10, 11]], SamplingParams(max_tokens=14, **GREEDY))
    steps = [x for x in lines() if "step" in x]
    assert steps[0]["blocks"][0][0] == [a["row"] for a in steps[0]["admitted"]]
    for step in steps:
        for rows, starts, counts, ids in step["blocks"]:
            assert len(rows) == len(starts) == len(counts) and sum(counts) == len(ids) == step["new_blocks"]
        assert step.get("block_ops") == ({k: len(v) for k, v in step["moves"].items()} if "moves" in step else None)
        assert not step["goes_on"] or step["only_decodes"]
    assert any("swap_in" in x.get("moves", {}) for x in steps)
    assert {i for x in steps for i in x["left"]} <= {"0", "1", "2"} and any(x["left"] for x in steps)


def test_stages_are_told_where_they_are_asked_for(traced):
    llm, lines = traced("engine.trace_stages=true")
    drawn = SamplingParams(temperature=0.5, top_k=3, seed=2**64 - 1, max_tokens=1)
    llm.generate([[4], [5]], [drawn, SamplingParams(max_tokens=1, **GREEDY)])
    (step,) = [x for x in lines() if "step" in x]
    first, second = step["stages"]["0"], step["stages"]["1"]
    assert [key for key, _ in first] == ["seed", "logits", "temperature", "top_k", "gumbel"]
    assert first[0][1] == "f" * 16 and [first[-1][1]] == step["tokens"]["0"]
    assert [key for key, _ in second] == ["logits", "argmax"] and second[-1][1] == 6


def test_hit_and_chunk_are_told(traced):
    llm, lines = traced("scheduler.max_num_batched_tokens=6")
    prompt = list(range(4, 14))
    for _ in range(2):
        llm.generate([prompt], SamplingParams(max_tokens=1, **GREEDY))
    steps = [x for x in lines() if "step" in x]
    assert [x["rows"] for x in steps] == [[["0", 0, 6, 0, False]], [["0", 6, 4, 0, True]], [["1", 8, 2, 0, True]]]
    assert [a["hit_tokens"] for x in steps for a in x["admitted"]] == [0, 8]


def test_preempted_request_comes_back_as_resumed(traced):
    llm, lines = traced("kv_cache.num_blocks=7")  # six blocks of 4 tokens
    llm.generate([[4, 5, 6, 7], [8, 9, 10, 11]], SamplingParams(max_tokens=14, **GREEDY))
    steps = [x for x in lines() if "step" in x]
    assert {i for x in steps for i in x["preempted"]} == {"1"}
    assert [a["id"] for x in steps for a in x["admitted"] if a["resumed"]] == ["1"]
    assert steps[-1]["counts"]["num_preemptions"] == 1


def test_abort_between_steps_is_a_line_of_its_own(traced):
    llm, lines = traced()
    llm.engine.add_request("a", [4], SamplingParams(max_tokens=9, **GREEDY))
    llm.engine.step()
    llm.engine.abort("a")
    last = lines()[-1]
    assert (last["end"], last["finish_reason"]) == ("a", "abort")


def ends(lines):
    return [(x["end"], x["finish_reason"]) for x in lines if "end" in x]


def in_steps(lines, key):
    """What the steps' lines hold under `key`, where it is not empty."""
    return [x[key] for x in lines if "step" in x and x[key]]


@pytest.mark.parametrize("ahead", ["false", "true"])
def test_end_by_a_stop_string_is_told_at_once_and_is_no_abort(traced, ahead):
    llm, lines = traced(f"engine.async_scheduling={ahead}")
    for _ in range(2):
        (output,) = llm.generate([[4]], SamplingParams(max_tokens=9, stop="w6", **GREEDY))
        assert output.outputs[0].finish_reason == "stop"
    assert ends(lines()) == [("0", "stop"), ("1", "stop")]
    assert in_steps(lines(), "finished") == in_steps(lines(), "aborted") == []


def test_each_completion_has_one_end(traced):
    llm, lines = traced()
    params = SamplingParams(n=2, temperature=5.0, seed=3, max_tokens=4, ignore_eos=True)
    whole = llm.generate([[4]], params)[0].outputs
    stop = f"w{whole[1].token_ids[1]}"
    assert stop not in whole[0].text.split()
    llm.generate([[4]], params.replace(stop=stop))
    assert in_steps(lines(), "finished") == [{"0": "length", "0\x1f1": "length"}, {"1": "length"}]
    assert ends(lines()) == [("1\x1f1", "stop")]


def test_stop_string_found_behind_the_end_of_the_last_step_is_told(traced, monkeypatch):
    llm, lines = traced("engine.async_scheduling=true")
    monkeypatch.setattr(OutputThread, "ready", lambda self: [])  # text comes late
    llm.generate([[4]], SamplingParams(max_tokens=3, stop="w6", **GREEDY))
    assert in_steps(lines(), "finished") == [{"0": "length"}]
    assert ends(lines()) == [("0", "stop")]


def test_end_by_a_stage_that_raises_is_told(traced, monkeypatch):
    llm, lines = traced()

    def fail(*_):
        raise StageError("sampler stage 'x' raised", "x", "a")

    for name in ("a", "b"):
        llm.engine.add_request(name, [4], SamplingParams(max_tokens=2, **GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.executor._runner.pipeline, "sample", fail)
        (output,) = llm.engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("a", "error")
    assert ends(lines()) == [("a", "error")]
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert (ends(lines()), in_steps(lines(), "finished")) == ([("a", "error")], [{"b": "length"}])


def test_full_disk_ends_the_trace_and_not_the_engine(traced, tmp_path, caplog, monkeypatch):
    llm, lines = traced()
    whole, calls = trace._write_whole, []

    def fails_in_the_middle(file, text):
        calls.append(text)
        if len(calls) == 3:
            file.write(text[:10])
            raise OSError(28, "No space left on device")
        whole(file, text)

    monkeypatch.setattr(trace, "_write_whole", fails_in_the_middle)
    with caplog.at_level(logging.ERROR, "framework"):
        outputs = llm.generate([[4]], SamplingParams(max_tokens=5, **GREEDY))
    assert outputs[0].outputs[0].token_ids == [5, 6, 7, 8, 9]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "t.jsonl: No space left on device. The trace ends here" in record.getMessage()
    assert [next(iter(x)) for x in lines()] == ["trace", "request", "step"]
    assert len(calls) == 3


def test_file_that_cannot_be_opened_is_refused_and_an_earlier_trace_outlives_a_build_that_fails(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"trace=.*/no/t\.jsonl: No such file or directory\. Name a file"):
        LLM(folder, overrides=[*SMALL, f"trace={tmp_path}/no/t.jsonl"])
    with pytest.raises(ConfigError, match=r"trace= is empty\. Name a file"):
        LLM(folder, overrides=[*SMALL, "trace="])
    (tmp_path / "t.jsonl").write_text("earlier\n")
    with pytest.raises(ConfigError, match="num_blocks"):
        LLM(folder, overrides=[*SMALL, f"trace={tmp_path}/t.jsonl", "kv_cache.num_blocks=999999999999"])
    assert (tmp_path / "t.jsonl").read_text() == "earlier\n"


def test_two_engines_keep_their_traces_apart(traced, tmp_path):
    one, lines = traced()
    other, others = traced(path=tmp_path / "other.jsonl")
    one.generate([[4]], SamplingParams(max_tokens=1, **GREEDY))
    assert len(lines()) == 3 and len(others()) == 1
    one.close()
    other.generate([[4]], SamplingParams(max_tokens=1, **GREEDY))
    assert len(lines()) == 3 and len(others()) == 3
