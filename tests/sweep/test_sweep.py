"""Whole sweeps from the command line: failures, a kill and the way back, kept weights, paired seeds, joblib."""

import csv
import json

import pytest

from .jobs import BENCH, SMALL, results_of

KILLED_BEFORE_THE_SEVENTH_RESULT = """
import os, signal, sys
from framework.sweep import job
write, written = job.write_json, []
def write_six(path, result):
    if len(written) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(path)
    write(path, result)
job.write_json = write_six
from framework.cli import main
main(sys.argv[1:])
"""
TWELVE = ("bench.input_len=8,16,30", "engine.max_model_len=32,64,96,128")
"""The longest prompts leave no room for an answer in the shortest limit: one of the jobs fails."""


@pytest.fixture
def sweep(typed_here, model):
    """Runs a sweep into the folder `s` in this process: (exit code, stderr)."""

    def run(*words, folder="s"):
        code, _, err = typed_here("--multirun", *words, f"model.path={model}", *SMALL, f"hydra.sweep.dir={folder}")
        return code, err

    return run


def test_sweep_of_twelve_jobs_outlives_a_failing_one_and_a_kill(python, model, tmp_path):
    others = [word for word in BENCH if not word.startswith("bench.input_len=")]
    words = ["bench", f"model.path={model}", *SMALL, *others, *TWELVE, "hydra.sweep.dir=s"]
    killed = python("-c", KILLED_BEFORE_THE_SEVENTH_RESULT, "--multirun", *words)
    assert killed.returncode == -9, killed.stderr
    before = {path: path.read_bytes() for path in tmp_path.glob("s/*/result.json")}
    assert len(before) == 6 and not (tmp_path / "s" / "results.csv").exists()

    resumed = python("-m", "framework.sweep", "--resume", "s")
    assert resumed.returncode == 1, resumed.stderr  # one job fails whenever it runs
    assert resumed.stderr.count(": done before\n") == 6
    assert "job 9 of 12: bench.input_len=30 engine.max_model_len=32: error" in resumed.stderr
    assert all(path.read_bytes() == text for path, text in before.items())
    results = results_of(tmp_path / "s")
    assert [one["status"] for one in results] == ["ok"] * 8 + ["error"] + ["ok"] * 3
    assert [one["start"] for one in results] == [0] * 6 + [1] * 6
    assert "bench.input_len=30" in results[8]["error"]
    with (tmp_path / "s" / "results.csv").open(newline="") as rows:
        assert [row["status"] for row in csv.DictReader(rows)] == [one["status"] for one in results]
    assert (tmp_path / "s" / "results.png").read_bytes().startswith(b"\x89PNG")


def test_failed_jobs_run_again_with_the_same_command(sweep, tmp_path):
    words = ("bench", "policy=fcfs,shortest", *BENCH)
    assert sweep(*words)[0] == 0
    path = tmp_path / "s" / "1" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "error", "error": "a fault"}))
    code, err = sweep(*words)
    assert (code, err.count("done before")) == (0, 1)
    assert [(one["status"], one["start"]) for one in results_of(tmp_path / "s")] == [("ok", 0), ("ok", 1)]


def test_folder_of_another_sweep_is_refused(sweep, tmp_path):
    assert sweep("plugins", "policy=fcfs")[0] == 0
    code, err = sweep("plugins", "policy=shortest")
    assert code == 2 and "error: hydra.sweep.dir=s holds the sweep of run=plugins policy=fcfs " in err
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nengine: {seed: 3}\n")
    code, err = sweep("plugins", "policy=fcfs", "--config-dir", ".", "--config-name", "mine")
    assert code == 2 and "error: hydra.sweep.dir=s: engine.seed had another value when this sweep began" in err


def test_sweep_whose_configuration_has_numbers_for_keys_is_resumed(sweep):
    words = ("plugins", "policy=fcfs,shortest", "sampler.logit_bias={5:1.0}")
    assert sweep(*words)[0] == 0
    code, err = sweep(*words)
    assert (code, err.count("done before")) == (0, 2)


def test_keys_of_clients_come_into_no_file(sweep, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nserver: {api_keys: [hidden]}\n")
    typed, swept = ("server.api_keys=[hidden]",), ("server.api_keys=[hidden],[other]",)
    mapped = ("server={api_keys:[hidden],port:81},{api_keys:[other]}",)
    for words in (typed, swept, mapped, ("--config-dir", ".", "--config-name", "mine")):
        code, err = sweep("plugins", "policy=fcfs,shortest", *words)
        assert code == 2 and "error: server.api_keys would stand in the files of the sweep. Use server.api_k" in err
        assert not (tmp_path / "s").exists()


def test_table_that_cannot_be_made_ends_the_sweep_with_its_fault(sweep, tmp_path, monkeypatch):
    from framework.sweep import report

    def write_no_picture(path, results):
        raise RuntimeError("no picture")

    monkeypatch.setattr(report, "write_picture", write_no_picture)
    code, err = sweep("plugins", "policy=fcfs")
    assert code == 1 and "RuntimeError: no picture" in err
    (tmp_path / "s" / "mine").mkdir()
    (tmp_path / "s" / "mine" / "result.json").write_text("{")
    code, err = sweep("plugins", "policy=fcfs")
    assert code == 2 and "mine/result.json" in err


def test_weights_stay_while_their_keys_do(sweep, tmp_path):
    assert sweep("bench", "engine.max_model_len=64,32", "sampler=gumbel,greedy", *BENCH)[0] == 0
    # The model is made for its longest context: another one means loading.
    assert [one["weights"] for one in results_of(tmp_path / "s")] == ["loaded", "kept", "loaded", "kept"]
    assert sweep("bench", "sampler=gumbel,greedy", "sweep.keep_weights=false", *BENCH, folder="t")[0] == 0
    assert [one["weights"] for one in results_of(tmp_path / "t")] == ["loaded", "loaded"]


def test_crash_is_recorded_with_its_trace_and_the_next_job_loads_anew(sweep, tmp_path, monkeypatch):
    from framework.engine.engine import Engine

    step, num_steps = Engine.step, []

    def step_that_breaks_once(self):
        num_steps.append(1)
        if len(num_steps) == 6:  # in the second job
            raise RuntimeError("a fault of ours")
        return step(self)

    monkeypatch.setattr(Engine, "step", step_that_breaks_once)
    code, err = sweep("bench", "policy=fcfs,shortest,priority", *BENCH)
    assert code == 1 and "Traceback" in err and "3 jobs, 1 failed" in err
    results = results_of(tmp_path / "s")
    assert [one["status"] for one in results] == ["ok", "error", "ok"]
    assert [one["weights"] for one in results] == ["loaded", "kept", "loaded"]
    assert results[1]["error"] == "RuntimeError: a fault of ours"
    assert "step_that_breaks_once" in results[1]["trace"]


def test_repetitions_have_the_same_seeds_in_every_combination(sweep, tmp_path):
    (tmp_path / "prompts").write_text('{"prompt_token_ids": [4, 5], "detokenize": false, "max_tokens": 12}\n')
    words = ("policy=fcfs,shortest", "sweep.repetitions=2", f"prompts_file={tmp_path / 'prompts'}", "output=o")
    assert sweep(*words)[0] == 0
    jobs = range(4)
    said = [json.loads((tmp_path / "s" / str(job) / "o").read_text())["token_ids"] for job in jobs]
    words = [json.loads((tmp_path / "s" / str(job) / "result.json").read_text())["overrides"][0] for job in jobs]
    assert words == [f"sweep.repetition={number}" for number in (0, 0, 1, 1)]
    assert said[0] == said[1] != said[2] == said[3]
    assert "| shortest | 2 |" in (tmp_path / "s" / "results.md").read_text()


def test_objective_is_a_figure_of_the_run(sweep, tmp_path):
    assert sweep("bench", "sweep.objective=goodness", *BENCH)[0] == 1
    (result,) = results_of(tmp_path / "s")
    assert result["error"].startswith("sweep.objective=goodness: there is no such choice. Choices: output tokens, all")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plugins", "sweep.repetitions=3"], "error: sweep.repetitions=3 is a word of the command line, beside --mul"),
        (["plugins", "sweep.objective=ttft_s"], "error: sweep.objective=ttft_s means nothing without --multirun"),
        (["plugins", "sweep.repetition=-1"], "error: sweep.repetition=-1 is too small"),
        (["-m", "plugins", "sweep.repetitions=0"], "error: sweep.repetitions=0 must be a number, 1 or more"),
        (["-m", "plugins", "sweep.repetitions=2", "sweep.repetition=0,1"], "error: sweep.repetitions and sweep.repeti"),
    ],
)
def test_words_of_a_sweep_that_do_not_fit_are_refused(typed_here, words, message):
    code, _, err = typed_here(*words)
    assert code == 2 and err.startswith(message), err


def test_jobs_run_beside_each_other_with_joblib(python, model, tmp_path):
    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "policy=fcfs,shortest", "hydra.sweep.dir=s"]
    done = python("-m", "framework", "--multirun", "bench", f"model.path={model}", *SMALL, *BENCH, *words)
    assert done.returncode == 0, done.stderr
    results = results_of(tmp_path / "s")
    assert [one["status"] for one in results] == ["ok", "ok"]
    assert "2 jobs, 0 failed" in done.stderr and "job 2 of 2: policy=shortest: ok" in done.stderr
