"""`bench=serve` from the command line: points and their report, sweeps, the search, interrupts, a server of ours."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest

from framework.config import Config
from framework.errors import ConfigError
from framework.runs.bench import serve
from framework.runs.bench.report import Report
from framework.runs.bench.serve.cpu import cpu_seconds, own_cpu_seconds
from framework.runs.bench.serve.options import LoadOptions
from framework.runs.bench.serve.rows import point_rows, remarks

FEW = ("bench.num_prompts=4", "bench.input_len=6", "bench.output_len=3", "run.warmup=0", "run.rounds=1")
SMALL = ("engine.dtype=float32", "engine.max_model_len=200", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=64")


@pytest.fixture
def loaded(typed_here, stand_in):
    """Runs `bench bench=serve WORDS` against the stand-in: (exit code, stdout, stderr)."""
    return lambda *words: typed_here("bench", "bench=serve", f"bench.url={stand_in.url}", *FEW, *words)


def bench_of(server, **keys):
    options = LoadOptions(url=server.url, **{"num_prompts": 4, "input_len": 6, "output_len": 3, **keys})
    return serve.Serve(options, Config())


def test_one_point_is_a_line_a_figure_and_says_what_was_measured(loaded, stand_in):
    code, out, err = loaded("bench.concurrency=2", "bench.slo.ttft_ms=60000")
    assert code == 0, err
    for figure in ("requests", "goodput", "output tokens", "TTFT, p50", "TPOT, p99", "ITL, mean", "E2E, p90"):
        assert re.search(rf"^  {figure} +[\d,.]+ +[\d,.]+ +[\d,.]+  (1/s|ms)$", out, re.MULTILINE), figure
    assert f"server {stand_in.url}" in out and "model stand-in" in out and "prompts token ids" in out
    assert "command   python -m framework run=bench bench=serve" in out


def test_json_has_every_point_with_its_samples(loaded):
    code, out, err = loaded("bench.rate=[200,400]", "run.json=true", "output=load.json")
    assert code == 0, err
    report = json.loads(out)
    points = report["rounds"][0]["points"]
    assert [point["load"] for point in points] == [{"rate": 200}, {"rate": 400}]
    for point in points:
        assert len(point["samples"]["TTFT"]) == 4 and point["errors"] == {} and point["counted_by"] == "usage"
        assert report["figures"][f"requests, rate {point['load']['rate']}"]["median"] == point["figures"]["requests"]
    assert report["engine"]["tokens"] == "usage" and report["options"]["num_prompts"] == 4


def test_sweep_is_a_row_a_point(loaded):
    code, out, _ = loaded("bench.concurrency=[1,2,4]")
    assert code == 0
    assert re.search(r"^ +answered/s +out tok/s +TTFT p50", out, re.MULTILINE)
    assert re.findall(r"^  concurrency (\d)", out, re.MULTILINE) == ["1", "2", "4"]


def test_every_point_gets_the_same_lengths_seeds_and_words_beyond_the_salt(loaded, stand_in):
    assert loaded("bench.concurrency=[1,2]", "bench.salt=5")[0] == 0
    met, one, two = stand_in.bodies[0], stand_in.bodies[1:5], stand_in.bodies[5:]
    assert met["max_tokens"] == 3

    def kept(bodies):
        return sorted((body["seed"], body["max_tokens"], body["prompt"][2:]) for body in bodies)

    assert kept(one) == kept(two)
    assert not {tuple(body["prompt"][:2]) for body in one} & {tuple(body["prompt"][:2]) for body in two}


def test_warm_up_is_one_short_pass_that_is_not_reported(loaded, stand_in):
    code, out, _ = loaded("bench.concurrency=[1,2]", "run.warmup=1", "bench.num_prompts=20", "run.json=true")
    assert code == 0 and len(json.loads(out)["rounds"]) == 1
    assert len(stand_in.bodies) == 1 + serve.NUM_WARM + 2 * 20


def test_saturation_is_searched_and_named(loaded):
    code, out, _ = loaded("bench.rate=saturation", "bench.rate_from=20", "bench.max_points=3")
    assert code == 0
    assert re.search(r"^  rate of saturation: \d+ requests a second$", out, re.MULTILINE)
    assert 2 <= len(re.findall(r"^  rate \d+", out, re.MULTILINE)) - 1 <= 3


def test_errors_stand_below_the_table_with_what_was_said(loaded, stand_in):
    stand_in.faults = {2: "refused", 3: "cut"}
    code, out, _ = loaded("bench.concurrency=1")
    assert code == 0
    assert "  1 times HTTP 429: come later" in out and "  1 times broken stream" in out
    assert re.search(r"^  errors +2 ", out, re.MULTILINE)


def test_plot_is_an_svg_with_the_curves(loaded, tmp_path):
    code, _, err = loaded("bench.concurrency=[1,2]", "run.plot=load.svg", "bench.slo.e2e_ms=60000", "run.rounds=2")
    assert code == 0, err
    assert xml.parse(tmp_path / "load.svg").getroot().tag.endswith("svg")
    drawn = (tmp_path / "load.svg").read_text()
    for text in ("TTFT, ms", "TPOT, ms", "requests under way", "p99", "within the limits", "tokens a second"):
        assert f"<!-- {text} -->" in drawn


def test_plot_that_cannot_be_written_names_its_key(stand_in, tmp_path):
    report = Report("serve", {}, {}, 0, 1, "")
    report.rounds = [bench_of(stand_in).round(None, 0, lambda done: None)]
    with pytest.raises(ConfigError, match=r"run.plot=.*no/such/x.svg: .*Name a file in a folder"):
        bench_of(stand_in).plot(str(tmp_path / "no/such/x.svg"), report)


def test_interrupt_reports_the_points_before_it_and_the_part_of_its_own(stand_in):
    bench, seen = bench_of(stand_in, concurrency=[1, 2, 4]), []
    stand_in.gap_s = 0.05

    def advance(done):
        seen.append(done)
        if sum(seen) >= 5:
            raise KeyboardInterrupt(2)

    done = bench.round(None, 0, advance)
    assert [point["load"]["concurrency"] for point in done.points] == [1, 2]
    assert done.points[0]["figures"]["cut off"] == 0 and 1 <= done.points[1]["figures"]["cut off"] <= 3


def test_interrupt_before_the_first_answer_has_nothing_to_report(stand_in):
    def advance(done):
        raise KeyboardInterrupt(2)

    stand_in.gap_s = 0.5
    with pytest.raises(KeyboardInterrupt):
        bench_of(stand_in, concurrency=1).round(None, 0, advance)


def test_time_of_a_point_is_bounded(loaded, stand_in):
    stand_in.first_s = 0.3
    code, out, _ = loaded("bench.concurrency=1", "bench.max_s=0.75", "bench.num_prompts=50", "run.json=true")
    (point,) = json.loads(out)["rounds"][0]["points"]
    assert code == 0 and point["figures"]["cut off"] + len(point["samples"]["TTFT"]) == 50
    assert len(point["samples"]["TTFT"]) <= 2


def test_cpu_seconds_of_a_named_process_count_as_the_servers(loaded):
    code, out, _ = loaded(
        "bench.concurrency=4", f"bench.server_pid={os.getpid()}", "bench.num_prompts=60", "run.json=true"
    )
    figures = json.loads(out)["rounds"][0]["figures"]
    assert code == 0
    # The stand-in is a thread of this process: both are the same seconds, read in steps of 10 ms.
    assert figures["server CPU"] == pytest.approx(figures["client CPU"], abs=0.05)


def test_cpu_seconds_grow_with_work_and_are_unknown_for_no_process():
    before, own = cpu_seconds(os.getpid()), own_cpu_seconds()
    while own_cpu_seconds() - own < 0.1:
        sum(range(10_000))
    assert cpu_seconds(os.getpid()) - before >= 0.08  # clock ticks of 10 ms on both sides
    assert cpu_seconds(2**22 + 1) is None


@pytest.mark.parametrize("word", ["engine.dtype=float32", "scheduler.max_num_seqs=3", "server.max_n=2", "policy=fcfs"])
def test_words_for_an_engine_are_refused_beside_another_server(loaded, word):
    code, _, err = loaded("bench.concurrency=1", word)
    assert code == 2 and f"{word} means nothing to run=bench; the server of bench.url has its own settings" in err


def test_server_words_are_refused_by_workloads_without_a_server(typed_here):
    code, _, err = typed_here("bench", "server.max_n=2")
    assert code == 2 and "server.max_n=2 means nothing to run=bench" in err


def test_unknown_server_is_one_line(typed_here):
    code, _, err = typed_here("bench", "bench=serve", "bench.url=http://127.0.0.1:1", *FEW)
    assert code == 2 and "bench.url=http://127.0.0.1:1 does not say which models it has" in err
    assert "Traceback" not in err


def test_missing_library_is_an_error_that_names_the_extra():
    program = "import sys; sys.modules['aiohttp'] = None; from framework.__main__ import program; program(sys.argv[1:])"
    words = ["bench", "bench=serve", "bench.url=http://127.0.0.1:1"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "needs the module 'aiohttp'" in done.stderr
    assert "pip install 'framework[bench]'" in done.stderr


def test_rows_leave_out_what_no_point_has_and_mark_late_points():
    def point(rate, late=None, **figures):
        return {"load": {"rate": rate}, "figures": {"requests": rate, **figures}, "late": late, "errors": {"x": 2},
                "messages": {"x": "why"}, "counted_by": "chunks"}  # fmt: skip

    class Round:
        points = (point(16.0, late="the generator was late: y"), point(2.0, **{"TTFT, p50": 4.25}))

    rows = point_rows([Round, Round])
    assert [row[0] for row in rows] == ["", "rate 2", "rate 16 *"]
    assert [cell.strip() for cell in rows[0]] == ["", "answered/s", "TTFT p50"]
    assert [cell.strip() for cell in rows[2]] == ["rate 16 *", "16.00", "-"]
    assert remarks([Round, Round]) == [
        "* rate 16: the generator was late: y; its latencies may be too high by as much",
        "tokens are counted as chunks: the server tells no usage",
        "8 times x: why",
    ]


# --------------------------------------------------------------------------------------------- a server of ours


def test_server_of_ours_is_started_measured_and_ended(typed_here, talker, monkeypatch):
    servers = []
    for name in ("http_proxy", "HTTP_PROXY"):  # which may be there for other addresses
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    class Noted(serve.OwnServer):
        def __init__(self, *args):
            super().__init__(*args)
            servers.append(self)

    monkeypatch.setattr(serve, "OwnServer", Noted)
    code, out, err = typed_here(
        "bench", "bench=serve", f"model.path={talker}", *SMALL, *FEW, "bench.token_ids=[0,256]", "run.json=true",
        "bench.concurrency=[1,4]", "server.api_keys=[secret]", "bench.sampling.temperature=0",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert "'server.api_keys=[...]'" in report["command"] and "secret" not in out
    assert report["engine"]["server"] == "of this configuration" and report["engine"]["prompts"] == "token ids"
    assert report["engine"]["ignore_eos"] is True and report["engine"]["tokens"] == "usage"
    for point in report["rounds"][0]["points"]:
        figures = point["figures"]
        assert point["errors"] == {} and len(point["samples"]["E2E"]) == 4
        assert figures["output tokens"] * figures["whole point"] == pytest.approx(12)
        assert figures["all tokens"] * figures["whole point"] == pytest.approx(12 + 24)
        assert figures["server CPU"] > 0 and figures["client CPU"] > 0
    assert len(servers) == 1 and servers[0]._child.returncode == 0


@pytest.mark.parametrize("after", [0, 1], ids=["before the first request", "under load"])
def test_server_of_ours_that_ends_by_itself_is_an_error(typed_here, talker, monkeypatch, after):
    kept, passes = [], []

    class Noted(serve.OwnServer):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self)

    def asks(self, number, asks=serve.Prompts.asks):
        passes.append(number)
        if len(passes) > after:
            kept[0]._child.kill()
            kept[0]._child.wait()
        return asks(self, number)

    monkeypatch.setattr(serve, "OwnServer", Noted)
    monkeypatch.setattr(serve.Prompts, "asks", asks)
    words = ("bench", "bench=serve", f"model.path={talker}", *SMALL, *FEW, "bench.token_ids=[0,256]")
    code, out, err = typed_here(*words)
    assert code == 1 and out == "" and "RuntimeError: the server of bench=serve ended with -9" in err


def test_configuration_that_our_server_refuses_is_said_in_one_line(typed_here):
    code, _, err = typed_here("bench", "bench=serve", "model.path=/nowhere/at/all", *FEW)
    assert code == 2 and "error: model.path=/nowhere/at/all" in err and "Traceback" not in err


def test_load_beyond_the_models_length_is_refused_before_a_server_starts(typed_here):
    code, _, err = typed_here(
        "bench", "bench=serve", "engine.max_model_len=100", "bench.input_len=90", "bench.output_len=20"
    )
    assert code == 2 and "make 110 tokens, but engine.max_model_len is 100" in err
