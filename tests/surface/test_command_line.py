"""`python -m framework` from outside: texts byte for byte, streams, files of prompts, errors of one line."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from framework.config import compose
from framework.runs import RunArgs, generate
from framework.runs.generate import DEFAULT_PROMPTS

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=64")


@pytest.fixture
def typed(folders, typed_here):
    """Runs a command line in this process, in an empty folder: (exit code, stdout, stderr)."""
    return lambda *words, model="chain": typed_here("generate", f"model.path={folders[model]}", *SMALL, *words)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return f"prompts_file={path}"


GREEDY = ("sampler.temperature=0", "sampler.max_tokens=3")


def test_prompt_and_its_text_go_to_stdout_and_a_closing_line_to_stderr(typed):
    code, out, err = typed("prompt=w4 w5", *GREEDY)
    assert (code, out) == (0, "w4 w5w6 w7 w8\n")
    last = err.splitlines()[-1]
    assert last.startswith("1 request, ") and "TTFT" in last and "TPOT" in last and "output tok/s" in last


@pytest.mark.parametrize(
    "text",
    [
        "Hello, {world} = (what?)", "a=b,c=[d] ${x} \\${y} \\\\", "it's \"so\"", "  two  spaces  ", "line\nbreak\ttab",
        "ünïcode 漢字 🙂", "null", "1e3", "@", "'\\",
    ],
)  # fmt: skip
def test_prompt_arrives_byte_for_byte(typed, tmp_path, text):
    if text == "@":  # begins with @: it goes in a file
        (tmp_path / "p").write_text(text)
        code, out, _ = typed("prompt=@p", *GREEDY)
    else:
        code, out, _ = typed(f"prompt={text}", *GREEDY)
    assert code == 0
    assert out.startswith(text) and len(out) > len(text) + 1


def test_at_reads_a_file_byte_for_byte(typed, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("w4\r\n ä w5\n".encode())
    code, out, _ = typed("prompt=@prompt.txt", *GREEDY)
    assert (code, out) == (0, "w4\r\n ä w5\nw6 w7 w8\n")
    code, out, err = typed("prompt=@nowhere.txt", *GREEDY)
    assert (code, out) == (2, "")
    assert err.startswith("error: prompt=@nowhere.txt: cannot read the file") and err.count("\n") == 1


def test_default_prompts_are_printed_in_order_with_as_many_tokens_as_any_other(typed):
    code, out, err = typed("sampler.temperature=0", "sampler.ignore_eos=true", "engine.max_model_len=128")
    assert code == 0
    # The tokenizer reads every word of theirs as w0, so that the chain begins at 1; special tokens are left out.
    text = " ".join(f"w{(1 + i) % 24}" for i in range(16) if (1 + i) % 24 not in (1, 3))
    assert out == "".join(f"{prompt}{text}\n\n" for prompt in DEFAULT_PROMPTS)
    assert "4 requests" in err


def test_configured_max_tokens_holds_for_the_default_prompts(typed, tmp_path):
    code, _, _ = typed("sampler.temperature=0", "sampler.max_tokens=2", "sampler.ignore_eos=true", "output=o.jsonl")
    assert code == 0
    assert [len(line["token_ids"]) for line in lines_of(tmp_path / "o.jsonl")] == [2] * 4


def test_checkpoints_own_defaults_reach_the_command_line(folders, typed, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(folders["chain"], folder)
    (folder / "generation_config.json").write_text('{"top_k": 1}')
    code, out, _ = typed(f"model.path={folder}", "prompt=w4", "sampler.max_tokens=12")
    assert (code, out) == (0, "w4" + " ".join(f"w{i}" for i in range(5, 17)) + "\n")


def test_prompts_file_gives_one_line_of_output_a_prompt(typed, tmp_path):
    words = write(
        tmp_path / "in.jsonl",
        {"prompt": "w4 w5", "id": "first"},
        "\n",
        {"prompt_token_ids": [7], "max_tokens": 1},
        {"messages": [{"role": "user", "content": "w7"}], "id": 9, "stop_token_ids": [11]},
        {"prompt": "w4", "temperature": 1.0, "top_k": 1, "seed": 3},
    )
    code, out, _ = typed(words, "output=out.jsonl", *GREEDY)
    assert (code, out) == (0, "")
    found = {line["id"]: line for line in lines_of(tmp_path / "out.jsonl")}
    assert {i: (x["text"], x["token_ids"], x["finish_reason"]) for i, x in found.items()} == {
        "first": ("w6 w7 w8", [6, 7, 8], "length"),
        "3": ("w8", [8], "length"),
        9: ("w10", [10, 11], "stop"),
        "5": ("w5 w6 w7", [5, 6, 7], "length"),
    }
    assert {line["index"] for line in found.values()} == {0}  # of the completion, as in CompletionOutput
    for line in found.values():
        assert set(line) == {"id", "index", "text", "token_ids", "finish_reason", "metrics"}
        assert {"arrival_time", "queue_time", "ttft", "tpot", "itl", "e2e"} == set(line["metrics"])


BAD_LINES = [
    ("{not json\n", "is not JSON: Expecting property name enclosed in double quotes at column 2; write an object"),
    ("Hello\n", 'is not JSON: Expecting value at column 1; write an object, as in {"prompt": "Hi"}'),
    ("[1]\n", "must be a JSON object, got list"),
    ({}, "exactly one of prompt, prompt_token_ids, messages; got none"),
    ({"prompt": "w4", "prompt_token_ids": [4]}, "exactly one"),
    ({"prompt": "w4", "temprature": 1}, "Did you mean 'temperature'"),
    ({"prompt": "w4", "top_p": 2}, r"top_p must be in (0, 1], got 2"),
    ({"prompt": "w4", "min_tokens": 9}, "min_tokens (9) must not exceed max_tokens (3)"),
    ({"prompt": "w4", "n": 0}, "n must be in 1..128, got 0"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": 5}, "prompt must be a string"),
    ({"prompt_token_ids": [99]}, "outside the vocabulary"),
    ({"prompt_token_ids": [4] * 64}, "the prompt has 64 tokens"),
    ({"prompt": "\ud800"}, "not valid Unicode"),
    ({"messages": 5}, "messages must be a list of dicts with role and content, got 5"),
    ({"messages": []}, "the list of messages is empty"),
    ({"messages": [{"content": "no role"}]}, "messages[0] has no role"),
    ({"prompt": "w4", "id": None}, "id must be a string or an integer, got None"),
    ({"prompt": "w4", "id": ""}, "id must not be empty"),
    ({"prompt": "w4", "id": "\ud800"}, "surrogates not allowed"),
    ({"prompt": "w4", "id": "good"}, "id 'good' stands in an earlier line as well"),
    ({"prompt": "w4", "stop_token_ids": [99]}, "stop_token_ids holds 99"),
]


def test_bad_line_is_reported_with_its_number_and_the_rest_runs(typed, tmp_path):
    words = write(
        tmp_path / "in.jsonl", {"prompt": "w4", "id": "good"}, *(line for line, _ in BAD_LINES), {"prompt": "w9"}
    )
    code, out, err = typed(words, "output=out.jsonl", *GREEDY)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "error: 22 of 24 lines refused; they are named above"
    reported = dict(line.split(": ", 1) for line in err.splitlines() if line.startswith("prompts_file line"))
    for number, (_, message) in enumerate(BAD_LINES, start=2):
        assert message in reported.pop(f"prompts_file line {number}")
    assert not reported
    assert sorted(line["text"] for line in lines_of(tmp_path / "out.jsonl")) == ["w10 w11 w12", "w5 w6 w7"]


def test_prompts_file_without_output_prints_prompts_and_texts_in_order(typed, tmp_path):
    words = write(tmp_path / "in.jsonl", {"prompt": "w4", "max_tokens": 9}, {"prompt": "w6", "max_tokens": 1})
    code, out, _ = typed(words, *GREEDY)
    assert (code, out) == (0, "w4w5 w6 w7 w8 w9 w10 w11 w12 w13\n\nw6w7\n\n")


def test_line_without_an_id_runs_beside_one_whose_id_is_its_number(typed, tmp_path):
    words = write(tmp_path / "in.jsonl", {"prompt": "w4", "id": "2"}, {"prompt": "w6"}, {"prompt": "w8", "id": 0})
    code, _, err = typed(words, "output=out.jsonl", *GREEDY)
    assert code == 0 and "prompts_file line" not in err
    found = [(line["id"], line["text"]) for line in lines_of(tmp_path / "out.jsonl")]
    assert found == [("2", "w5 w6 w7"), ("2", "w7 w8 w9"), (0, "w9 w10 w11")]


def test_line_may_say_what_a_prompt_dict_says(typed, tmp_path):
    say = {"role": "user", "content": "w7"}
    words = write(
        tmp_path / "in.jsonl",
        {"prompt": "w4", "priority": 5, "id": "late"},
        {"messages": [say], "priority": 1, "cache_salt": "a", "id": "early"},
        {"prompt_token_ids": [7], "priority": 3, "id": "middle"},
        {"messages": [say], "priority": "high"},
        {"messages": [say], "cache_salt": ""},
    )
    code, _, err = typed(words, "output=out.jsonl", *GREEDY, "policy=priority", "scheduler.max_num_seqs=1")
    assert code == 1 and err.splitlines()[-1].startswith("error: 2 of 5 lines refused")
    assert "line 4: priority" in err and "line 5: cache_salt must be" in err
    assert [line["id"] for line in lines_of(tmp_path / "out.jsonl")] == ["early", "middle", "late"]


def test_request_that_ends_with_an_error_makes_the_exit_code_1(typed, tmp_path, monkeypatch):
    whole = generate._Generation._take

    def failed(self, output):
        return whole(self, replace(output, error="broke"))

    monkeypatch.setattr(generate._Generation, "_take", failed)
    code, _, err = typed("prompt=w4", "output=out.jsonl", *GREEDY)
    assert code == 1 and "request 1: broke\n" in err
    assert err.splitlines()[-1] == "error: 1 of 1 requests ended with an error; they are named above"


def test_completions_of_token_ids_are_told_apart(typed, tmp_path):
    words = write(tmp_path / "in.jsonl", {"prompt_token_ids": [4], "n": 2}, {"prompt_token_ids": [4]})
    assert typed(words, *GREEDY)[:2] == (0, "[1, 1 of 2] w5 w6 w7\n\n[1, 2 of 2] w5 w6 w7\n\nw5 w6 w7\n\n")


def test_figures_that_a_request_of_one_token_lacks_are_left_out(typed):
    code, _, err = typed("prompt=w4", "sampler.max_tokens=1")
    last = err.splitlines()[-1]
    assert code == 0 and "TTFT" in last and "prefill" in last and "TPOT" not in last and "decode" not in last


def test_file_of_prompts_may_begin_with_a_byte_order_mark(typed, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "w4"}\n')
    assert typed("prompts_file=in.jsonl", *GREEDY)[:2] == (0, "w4w5 w6 w7\n\n")


def test_line_that_is_no_utf8_is_reported_with_its_number_and_the_rest_runs(typed, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "w4"}\n{"prompt": "w4\xff"}\n{"prompt": "w6"}\n')
    code, out, err = typed("prompts_file=in.jsonl", *GREEDY)
    assert (code, out) == (1, "w4w5 w6 w7\n\nw6w7 w8 w9\n\n")
    assert err.splitlines()[-1] == "error: 1 of 3 lines refused; they are named above"
    assert "prompts_file line 2: is not UTF-8: byte 0xff at 14\n" in err


@pytest.mark.parametrize("line", [b"{not json\n", b'{"prompt": ""}\n', b'\xff\xfe{\0"\0\n'])
def test_file_whose_every_line_is_refused_is_an_error_and_output_stays(typed, tmp_path, line):
    (tmp_path / "in.jsonl").write_bytes(line * 2)
    (tmp_path / "out.jsonl").write_text("earlier\n")
    code, out, err = typed("prompts_file=in.jsonl", "output=out.jsonl", *GREEDY)
    assert (code, out) == (2, "")
    assert err.count("prompts_file line ") == 2
    assert err.splitlines()[-1].startswith("error: prompts_file: every line was refused, so nothing ran.")
    assert (tmp_path / "out.jsonl").read_text() == "earlier\n"


def test_file_without_lines_runs_nothing_loads_nothing_and_is_no_error(typed, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    (tmp_path / "out.jsonl").write_text("earlier\n")
    code, out, err = typed("prompts_file=in.jsonl", "output=out.jsonl", "model.path=/nowhere/at/all")
    assert err == "prompts_file=in.jsonl: it has no lines, so nothing ran\n"
    assert (code, out, lines_of(tmp_path / "out.jsonl")) == (0, "", [])


def test_logprobs_stand_in_the_output_of_the_lines_that_ask_for_them(typed, tmp_path):
    words = write(tmp_path / "in.jsonl", {"prompt": "w4", "logprobs": 0}, {"prompt": "w6"}, {"prompt": "w8"})
    assert typed(words, "output=out.jsonl", *GREEDY)[0] == 0
    asked, *others = lines_of(tmp_path / "out.jsonl")
    best = 8 - math.log(math.exp(8) + 23)  # of the chain: one logit of 8 and 23 of 0
    assert [list(entry) for entry in asked["logprobs"]] == [["5"], ["6"], ["7"]]
    assert [entry[i] for entry, i in zip(asked["logprobs"], "567", strict=True)] == pytest.approx([best] * 3, abs=1e-5)
    assert asked["cumulative_logprob"] == pytest.approx(3 * best, abs=1e-5)
    assert all(not {"logprobs", "cumulative_logprob"} & set(line) for line in others)
    assert typed(words, "output=out.jsonl", *GREEDY, "sampler.logprobs=2")[0] == 0
    assert [len(line["logprobs"][0]) for line in lines_of(tmp_path / "out.jsonl")] == [1, 2, 2]


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_file_of_prompts_gives_whole_texts_whatever_the_output_kind(typed, tmp_path, kind):
    words = write(tmp_path / "in.jsonl", {"prompt": "w4"}, {"prompt": "w6", "output_kind": kind})
    whole = ["w5 w6 w7", "w7 w8 w9"]
    for more in ([], [f"sampler.output_kind={kind}"]):
        code, out, _ = typed(words, "output=out.jsonl", *GREEDY, *more)
        assert (code, out) == (0, "")
        assert [line["text"] for line in lines_of(tmp_path / "out.jsonl")] == whole
        assert typed(words, *GREEDY, *more)[:2] == (0, f"w4{whole[0]}\n\nw6{whole[1]}\n\n")


@pytest.mark.parametrize("args", [{"prompt": "w4"}, {"prompts_file": "in.jsonl"}])
def test_output_tokens_a_second_count_every_token_that_was_given(folders, tmp_path, monkeypatch, capsys, args):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", {"prompt": "w4"}, {"prompt": "w6", "max_tokens": 5})
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(generate, "perf_counter", lambda: next(clock))
    figures = generate.run(compose([f"model.path={folders['chain']}", *SMALL, *GREEDY]), RunArgs(**args))
    num_tokens = 3 if "prompt" in args else 3 + 5
    assert figures["output_tokens_per_s"] == num_tokens / 2.0
    assert figures["prefill_tokens_per_s"] > 0 and figures["decode_tokens_per_s"] > 0


def test_output_that_is_the_file_of_prompts_is_refused_and_the_file_stays(typed, tmp_path):
    words = write(tmp_path / "in.jsonl", {"prompt": "w4"})
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    for output in ("in.jsonl", "link.jsonl"):
        code, _, err = typed(words, f"output={output}", *GREEDY)
        assert code == 2
        assert err.splitlines()[-1].startswith(f"error: output={output} is the file of prompts_file=")
    assert lines_of(tmp_path / "in.jsonl") == [{"prompt": "w4"}]


@pytest.mark.parametrize("words", [["prompts_file=misspelt.jsonl"], ["model.path=/nowhere/at/all"]])
def test_output_of_an_earlier_run_outlives_a_run_that_cannot_begin(typed, tmp_path, words):
    (tmp_path / "out.jsonl").write_text("earlier and longer than what comes\n")
    assert typed(*words, "output=out.jsonl")[0] == 2
    assert (tmp_path / "out.jsonl").read_text() == "earlier and longer than what comes\n"
    assert typed("prompt=w4", "output=out.jsonl", *GREEDY)[0] == 0
    assert [line["text"] for line in lines_of(tmp_path / "out.jsonl")] == ["w5 w6 w7"]


def test_output_that_cannot_be_written_is_an_error_of_one_line(typed):
    code, out, err = typed("prompt=w4", "output=/dev/full", *GREEDY)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        "error: output=/dev/full: No space left on device. The lines before are in it; make room, or name another file"
    )
    assert "Traceback" not in err and "Exception" not in err


def test_folder_without_a_tokenizer_serves_a_file_of_token_ids(typed, tmp_path):
    words = write(tmp_path / "in.jsonl", {"prompt_token_ids": [4]}, {"prompt": "w4"}, {"messages": []})
    code, _, err = typed(words, "output=out.jsonl", *GREEDY, model="bare")
    assert code == 1
    assert [(x["text"], len(x["token_ids"])) for x in lines_of(tmp_path / "out.jsonl")] == [("", 3)]
    assert "line 2: the model has no tokenizer" in err and "line 3: messages need a chat template" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompt=w4", "prompts_file=x"], "prompt and prompts_file are both given"),
        (["prompt=w4", "system=y"], "system belongs to run=chat"),
        (["prompts_file=nowhere.jsonl"], "prompts_file=nowhere.jsonl: No such file"),
        (["output=no/such/folder/o"], "output=no/such/folder/o: No such file"),
        (["prompt="], "the prompt is empty"),
        (["prompt=w4", "output="], "output= is empty; name a file"),
        (["prompt=w4", "sampler=greedy", "sampler.temperature=0.5"], "sampler=greedy"),
        (["prompt=w4", "model.path=/nowhere/at/all"], "model.path=/nowhere/at/all"),
        (["prompt=w4", "engine.max_model_len=999"], "engine.max_model_len=999 is more than the 256 positions"),
        (["prompt=w4", "sampler.stop_token_ids=[24]"], "stop_token_ids holds 24"),
    ],
)
def test_error_is_one_line_on_stderr_with_exit_code_2(typed, words, message):
    code, out, err = typed(*words)
    assert (code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in err


def test_text_without_a_tokenizer_is_an_error_of_one_line(typed):
    code, out, err = typed("prompt=w4", model="bare")
    assert (code, out) == (2, "")
    assert "error: the model has no tokenizer" in err


def test_one_prompt_streams_and_an_interrupt_ends_cleanly(folders, tmp_path):
    words = [f"model.path={folders['chain']}", "engine.dtype=float32", "prompt=w4", "sampler.temperature=0",
             "sampler.ignore_eos=true", "sampler.max_tokens=250"]  # fmt: skip
    slow = "import framework.engine.core as c, time; step = c.EngineCore.step\n"
    slow += "c.EngineCore.step = lambda self: (time.sleep(0.05), step(self))[1]\n"
    program = f"{slow}from framework.cli import main; main(['generate', *{words!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert child.stdout.read(len("w4w5 w6")) == b"w4w5 w6"  # long before its 250 tokens are there
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert b"interrupted" in err and b"Traceback" not in err
    assert len(out.split()) < 60
    assert not list(tmp_path.iterdir())  # a single run writes no folder


def test_streamed_text_that_nobody_reads_ends_quietly(folders, tmp_path):
    words = [f"model.path={folders['chain']}", *SMALL, *GREEDY, "prompt=w4"]
    read, write_end = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "framework", *words], stdout=write_end, stderr=subprocess.PIPE, cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    finally:
        os.close(write_end)
    assert result.returncode == 141
    assert b"Traceback" not in result.stderr and b"BrokenPipe" not in result.stderr


def test_stdout_holds_text_alone_in_a_process_of_its_own(command, folders):
    result = command(
        f"model.path={folders['chain']}", *SMALL, "prompt=w4 w5", "+sampler=gumbel", "+backend=cpu", *GREEDY
    )
    assert (result.returncode, result.stdout) == (0, b"w4 w5w6 w7 w8\n")
    assert b"1 request, " in result.stderr


def test_sweep_over_the_sampler_records_the_figures_of_each_run(command, folders, tmp_path):
    result = command(
        "-m", f"model.path={folders['chain']}", *SMALL, "prompt=w4", "+sampler=gumbel,greedy", "output=o.jsonl"
    )
    assert result.returncode == 0, result.stderr
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("multirun/*/*/*/result.json"))]
    assert [r["status"] for r in results] == ["ok", "ok"]
    assert all(r["metrics"]["output_tokens_per_s"] > 0 and r["metrics"]["requests"] == 1 for r in results)
    written = [lines_of(path) for path in sorted(tmp_path.glob("multirun/*/*/*/o.jsonl"))]
    assert [len(lines) for lines in written] == [1, 1]  # each job's own
    assert not (tmp_path / "o.jsonl").exists()


def test_job_of_a_sweep_writes_no_output_outside_of_its_folder(command, folders, tmp_path):
    result = command("-m", f"model.path={folders['chain']}", *SMALL, "prompt=w4", "output=../o.jsonl")
    assert result.returncode == 1
    assert b"error: output=../o.jsonl: a job of a sweep writes into its own folder" in result.stderr
    assert not list(tmp_path.glob("**/o.jsonl"))


def test_trace_of_a_run_holds_its_steps_whatever_its_name(typed, tmp_path):
    name = "it's {a} trace, (really).jsonl"
    assert typed("prompt=w4", f"trace={name}", *GREEDY)[:2] == (0, "w4w5 w6 w7\n")
    assert [next(iter(line)) for line in lines_of(tmp_path / name)] == ["trace", "request", "step", "step", "step"]
    assert typed("prompt=w4", "trace=/dev/full", *GREEDY)[:2] == (0, "w4w5 w6 w7\n")
    code, _, err = typed("prompt=w4", "trace=no/such/t.jsonl", *GREEDY)
    assert code == 2 and "error: trace=no/such/t.jsonl: No such file or directory" in err


def test_every_job_of_a_sweep_has_a_trace_of_its_own(command, folders, tmp_path):
    result = command("-m", f"model.path={folders['chain']}", *SMALL, "prompt=w4", "engine.seed=1,2", "trace=t.jsonl")
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("multirun/*/*/*/t.jsonl"))) == 2
    assert not (tmp_path / "t.jsonl").exists()
