"""The command line: help without Hydra, one-line errors with exit code 2, sweeps, completion."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from framework.cli import main, split_flags
from framework.errors import ConfigError


@pytest.fixture
def framework(tmp_path):
    """Runs `python -m framework WORDS` in an empty folder."""

    def run(*words, **env):
        return subprocess.run(
            [sys.executable, "-m", "framework", *words],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
        )

    return run


def test_help_imports_neither_torch_nor_hydra_and_is_fast(tmp_path):
    program = """
import sys
from framework.cli import main
main(["--help"])
heavy = {"torch", "hydra", "omegaconf", "numpy", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    best = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # seconds of a processor: those on the clock are other programs' as well
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0, result.stderr
    assert "  gumbel         Gumbel-max sampling\n" in result.stdout
    assert "max_num_batched_tokens" not in result.stdout.split("flags:")[1]
    assert best < 0.3


def test_version_names_the_plugin_api(framework):
    assert framework("--version").stdout == "framework 0.1.0 (plugin API 1.0)\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["backend=tpu"], "error: backend=tpu is not built yet. Built: "),
        (["--cfgg"], "error: --cfgg: there is no such flag. Did you mean '--cfg'?"),
        (["plugins", "+engine.sed=1"], "error: engine.sed: there is no such key. Did you mean 'seed'?"),
        (["--cfg", "job", "engine.seed=x"], "error: engine.seed: Value 'x' of type 'str'"),
        (["plugins", "engine.seed=[1"], "error: engine.seed=[1: "),
        (["plugins", "sampler.seed=1,2"], "error: sampler.seed=1,2: several values for one key. Add --multirun"),
        (["--cfg", "xx"], "error: --cfg=xx: there is no such choice. Choices: job, hydra, all\n"),
        (["plugins", "--config-dir", "nowhere"], "error: --config-dir=nowhere: there is no such folder\n"),
    ],
)
def test_users_error_is_one_line_and_exit_code_2(framework, words, error):
    result = framework(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(error)
    assert result.stderr.count("\n") == 1


def test_character_that_stdout_cannot_show_is_escaped(framework):
    result = framework("--cfg", "job", "--package", "prompt", "prompt=é漢", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, r"\xe9\u6f22", "")


def test_trace_is_shown_on_request(framework):
    result = framework("plugins", "engine.sed=1", HYDRA_FULL_ERROR="1")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: engine.sed")


def test_run_plugins_prints_a_table_and_the_health_of_the_machine(framework, tmp_path):
    result = framework("plugins", "sampler=greedy", "+policy=priority")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["stage", "greedy", "framework", "0.1.0", "1.0", "active"] in lines
    assert ["stage", "gumbel", "framework", "0.1.0", "1.0", "usable"] in lines
    assert ["policy", "priority", "framework", "0.1.0", "1.0", "active"] in lines
    names = [line[0] for line in lines[lines.index(["health:"]) + 1 :]]
    assert names == ["python", "torch", "threads", "free"]
    assert not list(tmp_path.iterdir())  # a single run writes no folder


def test_sweep_goes_on_after_a_users_error_and_makes_a_table(framework, tmp_path):
    result = framework("-m", "plugins", "+sampler=gumbel,greedy", "kv_cache.block_size=8,0", "trace=a,b")
    assert result.returncode == 1, result.stderr
    (folder,) = tmp_path.glob("multirun/*/*")
    results = [json.loads((folder / str(job) / "result.json").read_text()) for job in range(4)]
    assert [r["status"] for r in results] == ["ok", "error", "ok", "error"]
    assert results[1]["error"] == "kv_cache.block_size=0 is too small. Use 1 or more"
    assert results[2]["overrides"] == ["run=plugins", "sampler=greedy", "kv_cache.block_size=8", "trace='a,b'"]
    assert len((folder / "results.csv").read_text().splitlines()) == 5
    assert "4 jobs, 2 failed" in result.stderr
    assert "HYDRA" not in result.stdout  # logs go to stderr


def test_table_of_a_sweep_is_made_again_on_request(tmp_path):
    def sweep(*words):
        program = [sys.executable, "-m", "framework.sweep", *words]
        return subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)

    (tmp_path / "sweep" / "0").mkdir(parents=True)
    result = {"overrides": ["a=1"], "status": "ok", "metrics": {}, "error": None}
    (tmp_path / "sweep" / "0" / "result.json").write_text(json.dumps(result))
    assert sweep("sweep").returncode == 0
    assert "a=1" in (tmp_path / "sweep" / "results.md").read_text()
    usage = "usage: python -m framework.sweep [--resume] DIR"
    for words, message in (([], usage), (["nowhere"], "nowhere: there is no such")):
        refused = sweep(*words)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert message in refused.stderr


@pytest.mark.parametrize("words", [["plugins"], ["--help"], ["--version"], ["plugins", "--cfg", "job"]])
def test_output_that_nobody_reads_ends_quietly(words):
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run([sys.executable, "-m", "framework", *words], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (141, b"")


def test_own_primary_and_folder_work_with_the_same_words(framework, tmp_path):
    (tmp_path / "exp1.yaml").write_text("defaults: [config, _self_]\nengine: {seed: 3, graphs: off}\n")
    result = framework("--config-dir", ".", "--config-name", "exp1", "+sampler=greedy", "--cfg", "job", "-p", "engine")
    assert result.returncode == 0, result.stderr
    assert "seed: 3" in result.stdout


def test_completion_knows_the_choices():
    script = os.path.join(os.path.dirname(sys.executable), "framework")
    result = subprocess.run(
        [script, "-sc", "query=bash"],
        env={**os.environ, "COMP_LINE": "framework sampler="},
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == [f"sampler={name}" for name in ("full", "greedy", "gumbel", "mirostat")]


def test_flags_stand_anywhere_and_keep_their_values():
    flags, words = split_flags(["a=1", "-cn", "exp", "b", "--multirun", "c=-2", "--config-dir=d"])
    assert flags == {"--config-name": "exp", "--multirun": None, "--config-dir": "d"}
    assert words == ["a=1", "b", "c=-2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "--cfg", "job"], "--multirun and --cfg exclude each other"),
        (["--config-name"], "--config-name needs a value"),
        (["--resolve"], "--resolve belongs to --cfg"),
        (["--foo"], r"--foo: there is no such flag\. Flags: --cfg"),
        (["-c", "jbo"], r"--cfg=jbo: there is no such choice\. Did you mean 'job'\? Choices: job, hydra, all"),
        (["--info=plugin"], r"--info=plugin: there is no such choice\. Did you mean 'plugins'\?"),
    ],
)
def test_flags_that_do_not_fit_are_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        split_flags(argv)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run_without_a_trace(number):
    program = """
import time
import framework.runs.plugins as plugins
from framework.cli import main
def run(config, args):
    print("running", flush=True)
    time.sleep(60)
plugins.run = run
main(["plugins"])
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "running\n"
    child.send_signal(number)
    _, error = child.communicate(timeout=20)
    assert (child.returncode, error) == (128 + number, "interrupted\n")


def test_text_that_is_given_twice_is_refused_with_both(capsys):
    with pytest.raises(SystemExit):
        main(["prompt=a", "+prompt=b"])
    said = "error: prompt=a and +prompt=b: only one prompt can be given. Leave the others out\n"
    assert capsys.readouterr().err == said


def test_help_lists_the_options_of_runs_and_workloads(framework):
    shown = framework("--help").stdout
    assert "      run.rounds: 3" in shown and "      bench.rate: null" in shown
    assert "      run.name" not in shown
