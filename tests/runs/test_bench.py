"""`run=bench`: the same work every round, figures that follow from it, a report that says where they come from."""

import json
import re
import signal
import sys
import xml.etree.ElementTree as xml

import numpy as np
import pytest

from framework import LLM
from framework.config import Config
from framework.errors import ConfigError
from framework.interfaces import BenchRound
from framework.runs.bench import startup, workload
from framework.runs.bench.plot import plot
from framework.runs.bench.report import Report
from framework.runs.bench.throughput import Throughput
from framework.runs.options import ThroughputOptions

SMALL = ("engine.dtype=float32", "engine.max_model_len=200", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=64")
FEW = ("bench.num_prompts=3", "bench.input_len=20", "bench.output_len=4", "run.warmup=1", "run.rounds=2")


@pytest.fixture
def benched(talker, typed_here):
    """Runs `bench WORDS` in this process: (exit code, stdout, stderr)."""
    return lambda *words: typed_here("bench", f"model.path={talker}", *SMALL, *words)


@pytest.fixture(scope="module")
def engine(talker):
    with LLM(talker, overrides=SMALL) as llm:
        yield llm.engine


def test_throughput_counts_what_was_asked_for_and_reports_where(benched, tmp_path):
    code, out, err = benched(*FEW, "run.json=true", "output=it's.json", "bench.output_len_min=2")
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads((tmp_path / "it's.json").read_text())
    assert (len(report["rounds"]), report["warmup_rounds"], report["interrupted"]) == (2, 1, False)
    for one in report["rounds"]:
        figures = one["figures"]
        seconds = figures["whole round"]
        assert figures["requests"] * seconds == pytest.approx(3)
        assert 6 <= figures["output tokens"] * seconds <= 12.01
        assert figures["all tokens"] * seconds == pytest.approx(60 + figures["output tokens"] * seconds)
        assert len(one["samples"]["TTFT, ms"]) == 3
    first = report["figures"]["whole round"]
    assert first["min"] <= first["median"] <= first["max"]
    assert report["engine"]["model"] == "llama" and report["machine"]["processor"] and report["versions"]["torch"]
    assert report["command"].startswith("python -m framework run=bench model.path=")
    assert "'output=it'\"'\"'s.json'" in report["command"]


def test_table_has_a_line_a_figure_with_its_unit(benched):
    code, out, _ = benched(*FEW)
    assert code == 0
    assert re.search(r"^  output tokens +[\d,.]+ +[\d,.]+ +[\d,.]+  1/s$", out, re.MULTILINE)
    assert "2 rounds after 1 of warm-up" in out
    for word in ("workload", "engine", "machine", "versions", "command"):
        assert re.search(rf"^  {word} ", out, re.MULTILINE)


def test_latency_runs_one_request_at_a_time(benched):
    code, out, _ = benched("bench=latency", "bench.num_prompts=1", "bench.input_lens=[8,40]", "bench.output_len=3",
                           "run.rounds=1", "run.warmup=0", "run.json=true")  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert list(report["figures"]) == [
        "TTFT, 8 tokens in",
        "TTFT, 40 tokens in",
        "TPOT, 8 tokens in",
        "TPOT, 40 tokens in",
    ]
    assert len(report["rounds"][0]["samples"]["gap between tokens, ms"]) == 2 * 2


def test_startup_adds_up_to_the_first_token(benched):
    code, out, _ = benched("bench=startup", "run.rounds=1", "run.warmup=0", "run.json=true")
    assert code == 0
    figures = {name: one["median"] for name, one in json.loads(out)["figures"].items()}
    whole = figures.pop("start to first token")
    assert sum(figures.values()) == pytest.approx(whole) and all(value > 0 for value in figures.values())


def test_process_of_startup_is_killed_by_what_comes_up_meanwhile():
    beats = []

    def tick():
        beats.append(1)
        if len(beats) == 2:
            raise KeyboardInterrupt(15)

    program = [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)",
    ]
    with pytest.raises(KeyboardInterrupt):
        startup._run(program, b"x", tick)  # returns when the process is gone: else in a quarter of an hour
    assert len(beats) == 2


def test_process_of_startup_may_say_and_get_much():
    program = [
        sys.executable,
        "-c",
        "import sys, time; time.sleep(0.3); sys.stdout.write(sys.stdin.read()); sys.exit(3)",
    ]
    assert startup._run(program, b"x" * 300_000, lambda: None) == (3, b"x" * 300_000, b"")


def test_startup_that_is_refused_says_why(benched):
    code, _, err = benched("bench=startup", "model.path=/nowhere/at/all")
    assert code == 2
    assert "error: model.path=/nowhere/at/all" in err and "Traceback" not in err


def test_rounds_are_the_same_work_and_find_nothing_in_the_cache(engine):
    bench = Throughput(ThroughputOptions(num_prompts=2, input_len=48, output_len=3, input_len_min=40), Config())
    before = engine.stats()["prefix_hit_tokens"]
    works = [bench._work(engine) for _ in range(2)]
    assert works[0] == works[1] and {40 <= len(one.token_ids) <= 48 for one in works[0]} == {True}
    rounds = [workload.pass_through(engine, works[0], f"round {n}", False, lambda count: None)[0] for n in range(2)]
    tokens = [[one.output.outputs[0].token_ids for one in done] for done in rounds]
    assert tokens[0] == tokens[1]
    assert engine.stats()["prefix_hit_tokens"] == before


def test_arrivals_follow_the_rate_and_time_counts_from_them(engine):
    due = workload.arrivals(np.random.default_rng(0), 2000, rate=4.0)
    gaps = np.diff(due)
    assert due[0] == 0.0 and (gaps > 0).all()
    assert np.mean(gaps) == pytest.approx(0.25, abs=4 * 0.25 / 2000**0.5)  # four standard errors
    assert workload.arrivals(np.random.default_rng(0), 3, None) == [0.0] * 3
    work = [workload.Work([5, 6], 2, due, 0) for due in (0.0, 0.3)]
    done, seconds = workload.pass_through(engine, work, "late", False, lambda count: None)
    assert seconds >= 0.3 and done[1].late >= 0 and done[1].ttft >= done[1].metrics.ttft


def test_interrupt_reports_the_rounds_before_it(benched, monkeypatch):
    import os

    whole, rounds = Throughput.round, []

    def interrupted_in_the_third(self, engine, number, advance):
        rounds.append(number)
        if len(rounds) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, engine, number, advance)

    monkeypatch.setattr(Throughput, "round", interrupted_in_the_third)
    code, out, err = benched(*FEW, "run.rounds=5", "run.json=true", "output=o.json")
    assert code == 128 + signal.SIGTERM
    report = json.loads(out)
    assert (len(report["rounds"]), report["interrupted"]) == (1, True)
    assert "interrupted" in err and "Traceback" not in err


def test_interrupt_before_the_first_round_reports_nothing(benched, monkeypatch, tmp_path):
    import os

    monkeypatch.setattr(Throughput, "check", lambda self, engine: os.kill(os.getpid(), signal.SIGINT))
    (tmp_path / "o.json").write_text("earlier\n")
    code, out, err = benched(*FEW, "output=o.json")
    assert (code, out) == (130, "")
    assert err.endswith("no round was done, so there is no report\ninterrupted\n")
    assert (tmp_path / "o.json").read_text() == "earlier\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench.num_prompts=0"], "bench.num_prompts=0 is too small. Use 1 or more"),
        (["bench.input_len=200"], "bench.input_len=200 and bench.output_len=64 make 264 tokens"),
        (["bench.input_len_min=300"], "bench.input_len_min=300 is above bench.input_len=128"),
        (["bench.rate=0"], "bench.rate=0.0 must be above 0"),
        (["bench.nmu_prompts=1"], "bench.nmu_prompts: there is no such key. Did you mean 'num_prompts'?"),
        (["bench=latncy"], "bench=latncy: there is no such choice. Did you mean 'latency'?"),
        (["bench=latency", "bench.input_lens=[]"], "bench.input_lens=[] holds no length"),
        (["model.path=/nowhere", "bench.input_len=150"], "bench.input_len=150 and bench.output_len=64 make 214 tokens"),
        (["model.path=/nowhere", "bench=latency"], "bench.input_lens=512 and bench.output_len=32 make 544 tokens"),
        (["model.path=/nowhere", "bench=startup", "bench.input_len=200"], "bench.input_len=200 and one token make 201"),
        (["run.rounds=0"], "run.rounds=0 is too small"),
        (["run.plot=a.png"], "run.plot=a.png: plots are SVG"),
        (["prompt=x"], "prompt=x means nothing to run=bench"),
        (["sampler.max_tokens=3"], "sampler.max_tokens=3 means nothing to run=bench; the keys under bench say how"),
        (["bench=startup", "+sampler.n=4"], "sampler.n=4 means nothing to run=bench; a request of this workload has"),
        (["output=no/such/o"], "output=no/such/o: No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(benched, words, message):
    code, out, err = benched(*words)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_plot_that_cannot_be_written_is_refused_and_costs_no_report(benched):
    code, out, err = benched(*FEW, "run.plot=no/such/p.svg")
    assert code == 2 and "run.plot=no/such/p.svg: No such file" in err
    assert "whole round" in out


def test_files_of_a_benchmark_are_files_of_their_own(benched):
    code, _, err = benched(*FEW, "output=a.svg", "run.plot=./a.svg")
    assert code == 2 and "run.plot=./a.svg is the file of output=a.svg; name another file" in err


def test_every_job_of_a_sweep_has_a_plot_of_its_own(command, tmp_path):
    result = command("-m", "bench", *FEW, "engine.seed=1,2", "run.plot=p.svg")
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("multirun/*/*/*/p.svg"))) == 2
    assert not (tmp_path / "p.svg").exists()


def report_of(rounds, units):
    report = Report("throughput", {"seed": 0}, units, 0, len(rounds), "python -m framework bench <&>")
    report.rounds += rounds
    return report


def test_plot_is_whole_and_shows_the_median_where_it_is():
    rounds = [BenchRound({"x": 1.0}, {"TTFT, ms": [10.0, 20.0]}), BenchRound({"x": 1.0}, {"TTFT, ms": [30.0, 40.0]})]
    drawn = plot(report_of(rounds, {"x": "s"}), ())
    texts = [node.text for node in xml.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "TTFT, ms: share of 4 at or below" in texts and "median 20" in texts and "p99 40" in texts
    assert "python -m framework bench <&>" in texts


def test_plot_of_parts_has_a_bar_a_round_as_long_as_their_sum():
    rounds = [BenchRound({"a": 1.0, "b": 3.0}), BenchRound({"a": 1.0, "b": 1.0})]
    drawn = xml.fromstring(plot(report_of(rounds, {"a": "s", "b": "s"}), ("a", "b")))
    boxes = [r for r in drawn.iter("{http://www.w3.org/2000/svg}rect") if float(r.get("height")) not in (10.0,)][1:]
    widths = [float(box.get("width")) for box in boxes]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.3) and widths[2] == pytest.approx(widths[3], abs=0.3)
    ends = [float(box.get("x")) + float(box.get("width")) for box in boxes]
    assert float(boxes[1].get("x")) == pytest.approx(ends[0], abs=0.11)


def test_parts_beyond_the_colours_begin_with_the_first_again():
    names = [f"part {i}" for i in range(8)]
    drawn = xml.fromstring(plot(report_of([BenchRound(dict.fromkeys(names, 1.0))], dict.fromkeys(names, "ms")), names))
    texts = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "part by part in ms, a bar a round" in texts and "part 7 1.00" in texts


def test_options_of_another_workload_are_refused():
    from framework.plugins import registry

    assert {spec.name for spec in registry().specs("bench")} == {"latency", "serve", "startup", "throughput"}
    with pytest.raises(ConfigError, match=r"bench=latency\.rate: there is no such key"):
        registry().build_options("bench", "latency", {"rate": 1})
