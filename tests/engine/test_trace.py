"""`trace=FILE` holds every request and every step, and a disk that is full ends the trace and not the engine."""

import json
import logging

import pytest
import torch

from framework import LLM, SamplingParams
from framework.errors import ConfigError
from framework.testing.crafted import save_crafted

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4", "kv_cache.block_size=4")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Greedy goes from token t to t + 1, of 24."""
    table = 8.0 * torch.eye(24).roll(1, 1)
    return save_crafted(tmp_path_factory.mktemp("trace") / "chain", table, eos_token_id=3)


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
    assert (header["trace"], header["num_blocks"]) == (1, llm.engine.facts["num_blocks"])
    assert [(x["request"], x["num_prompt_tokens"], x["max_total_tokens"]) for x in (first, second)] == [
        ("0", 2, 4), ("1", 3, 4),
    ]  # fmt: skip
    assert [x["rows"] for x in steps] == [[["0", 0, 2, 0, True], ["1", 0, 3, 0, True]], [["0", 2, 1, 0, True]]]
    assert [x["tokens"] for x in steps] == [{"0": [6], "1": [9]}, {"0": [7]}]
    assert [x["finished"] for x in steps] == [{"1": "length"}, {"0": "length"}]
    assert [x["step"] for x in steps] == [0, 1]
    assert steps[0]["t"] <= steps[1]["t"] and steps[0]["seconds"]["forward"] > 0
    assert steps[0]["new_blocks"] == 2


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


def test_full_disk_ends_the_trace_and_not_the_engine(traced, tmp_path, caplog, monkeypatch):
    from framework.engine import trace

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
