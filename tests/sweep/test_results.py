"""What is made of results: means and their intervals, pairs, the front, table and picture."""

import csv
import json
import sys

import pytest
from scipy import stats

from framework.errors import ConfigError
from framework.sweep.interval import Mean, student_t
from framework.sweep.picture import layout_of, panels_of
from framework.sweep.report import write_results
from framework.sweep.results import Results

from .jobs import write_job


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 101])
def test_quantile_is_that_of_students_distribution(degrees):
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)
    assert student_t(degrees, 0.5) == pytest.approx(stats.t.ppf(0.75, degrees), rel=1e-9)


def test_interval_of_a_mean_is_that_of_a_t_test():
    values = [3.0, 4.5, 4.0, 7.0]
    low, high = stats.t.interval(0.95, 3, loc=4.625, scale=stats.sem(values))
    mean = Mean.of(values)
    assert (mean.value - mean.half_width, mean.value + mean.half_width) == pytest.approx((low, high))
    assert Mean.of([2.0]) == Mean(2.0, None, 1)
    assert (str(Mean.of([2.0])), str(Mean(12.345678, 0.5, 3)), str(Mean(1234.5, None, 1))) == (
        "2",
        "12.35 ± 0.5",
        "1,234",
    )


def four_by_two(folder):
    """Two policies by two limits, each twice: (requests_per_s, ttft_s)."""
    figures = {("fcfs", 1): (10, 1.0), ("fcfs", 8): (40, 2.0), ("shortest", 1): (9, 1.5), ("shortest", 8): (44, 2.5)}
    number = 0
    for repetition in (0, 1):
        for (policy, limit), (rate, ttft) in figures.items():
            words = f"run=bench sweep.repetition={repetition} policy={policy} scheduler.max_num_seqs={limit}"
            write_job(folder, number, words, {"rate_per_s": rate * (1 + repetition), "ttft_s": ttft})
            number += 1
    return Results.read(folder)


def test_combinations_gather_the_repetitions(tmp_path):
    results = four_by_two(tmp_path)
    assert results.varied == ["policy", "scheduler.max_num_seqs"] and results.common == ["run=bench"]
    assert [one.label for one in results.combinations] == ["fcfs, 1", "fcfs, 8", "shortest, 1", "shortest, 8"]
    mean = results.combinations[1].mean("rate_per_s")
    assert (mean.value, mean.n) == (60, 2)


def test_differences_are_taken_between_equal_seeds(tmp_path):
    first, _, third, _ = four_by_two(tmp_path).combinations
    gain = third.gain_on(first, "rate_per_s")
    # The rates double from one repetition to the next; the difference does not, and that is what pairs are for
    assert (gain.value, gain.half_width, gain.n) == (pytest.approx(-10), pytest.approx(0, abs=1e-9), 2)


def test_front_holds_what_nothing_beats_in_both(tmp_path):
    results = four_by_two(tmp_path)
    assert (results.throughput, results.latencies) == ("rate_per_s", ["ttft_s"])
    assert [one.label for one in results.front] == ["fcfs, 1", "fcfs, 8", "shortest, 8"]
    write_results(tmp_path)
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[0] == "# 8 jobs, 0 failed"
    assert [line.split("|")[-2].strip() for line in lines if line.startswith("| shortest |")][:2] == ["", "yes"]


def test_axis_below_is_the_number_that_varied(tmp_path):
    layout = layout_of(four_by_two(tmp_path))
    assert (layout.across, layout.values, layout.is_numeric) == ("scheduler.max_num_seqs", ["1", "8"], True)
    assert list(layout.series) == ["policy=fcfs", "policy=shortest"]


def test_names_stand_below_groups_of_bars(tmp_path):
    for number, words in enumerate(["policy=a sampler=greedy", "policy=b sampler=greedy", "policy=a sampler=gumbel"]):
        write_job(tmp_path, number, words, {"seconds": number + 1.0})
    results = Results.read(tmp_path)
    layout = layout_of(results)
    assert (layout.across, layout.is_numeric, panels_of(results)) == ("sampler", False, ["seconds"])
    assert write_results(tmp_path) == 0 and (tmp_path / "results.png").stat().st_size > 1000


def test_units_name_rate_and_latency(tmp_path):
    units = {"output tokens": "1/s", "TTFT, median": "ms", "TPOT, median": "ms"}
    write_job(tmp_path, 0, "a=1", dict.fromkeys(["whole", *units], 1.0), units=units)
    results = Results.read(tmp_path)
    assert (results.throughput, results.latencies) == ("output tokens", ["TPOT, median", "TTFT, median"])
    assert results.front == []  # nothing varied


def test_failed_jobs_stand_in_the_table_with_their_error(tmp_path, capsys):
    write_job(tmp_path, 0, "a=1", {"x": 2.0})
    write_job(tmp_path, 1, "a=2", error="too | large")
    assert write_results(tmp_path) == 1
    assert capsys.readouterr().err.splitlines()[0] == f"2 jobs, 1 failed: {tmp_path / 'results.md'}"
    page = (tmp_path / "results.md").read_text()
    assert "| 2 | 0 |  |" in page and "too \\| large |" in page
    with (tmp_path / "results.csv").open(newline="") as rows:
        assert [row["error"] for row in csv.DictReader(rows)] == ["", "too | large"]


def test_differences_are_from_the_first_combination_that_has_figures(tmp_path):
    for number, policy in enumerate(["a", "b", "c"]):
        words, figures = f"sweep.repetition=0 policy={policy}", {"x": number * 2.0}
        write_job(tmp_path, number, words, figures if number else None, error=None if number else "a fault")
    write_results(tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "Against `policy=b`, in pairs of equal seeds" in page and "| c | 1 | 100 % |" in page


def test_figure_that_is_called_seconds_does_not_hide_those_of_the_job(tmp_path):
    write_job(tmp_path, 0, "a=1", {"seconds": 9.0})
    write_results(tmp_path)
    with (tmp_path / "results.csv").open(newline="") as rows:
        (row,) = csv.DictReader(rows)
    assert (row["job_seconds"], row["seconds"]) == ("1.5", "9.0")


def test_values_that_are_not_finite_are_names_below_bars(tmp_path):
    for number, value in enumerate(["1", "2", "inf"]):
        write_job(tmp_path, number, f"a={value}", {"x": 1.0})
    assert layout_of(Results.read(tmp_path)).is_numeric is False
    assert write_results(tmp_path) == 0 and (tmp_path / "results.png").exists()


def test_figure_that_is_not_finite_was_not_measured(tmp_path):
    for number, value in enumerate([2.0, float("nan"), float("inf"), 4.0]):
        write_job(tmp_path, number, f"sweep.repetition={number}", {"x": value})
    (one,) = Results.read(tmp_path).combinations
    assert (one.mean("x").value, one.mean("x").n) == (3.0, 2)


def test_jobs_without_a_result_are_counted(tmp_path, capsys):
    write_job(tmp_path, 0, "a=1", {"x": 2.0})
    (tmp_path / "sweep.lock.json").write_text(json.dumps({"num_jobs": 3, "argv": []}))
    assert write_results(tmp_path) == 0
    line = f"2 of 3 jobs have no result yet: python -m framework.sweep --resume {tmp_path}"
    assert line in capsys.readouterr().err.splitlines()
    assert line in (tmp_path / "results.md").read_text().splitlines()


def test_without_matplotlib_the_table_is_made_and_the_extra_named(tmp_path, capsys, monkeypatch):
    write_job(tmp_path, 0, "a=1", {"x": 2.0})
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_results(tmp_path)
    assert "no results.png: matplotlib is not installed. pip install 'framework[sweep]'" in capsys.readouterr().err
    assert (tmp_path / "results.md").exists() and not (tmp_path / "results.png").exists()


def test_result_that_is_none_is_named(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"0/result\.json: .*Remove it, and resume the sweep"):
        Results.read(tmp_path)
