"""Figures of a benchmark: median, spread, floor, and the files that a report leaves."""

import json

import pytest


@pytest.fixture
def figures(script):
    return script("figures")


def test_few_values_are_told_with_their_extremes_and_many_with_their_percentiles(figures):
    assert figures.Figure("b", "few", "ms", [3.0, 1.0, 2.0]).spread == (1.0, 3.0)
    least, most = figures.Figure("b", "many", "ms", [*map(float, range(1, 100)), 1e6]).spread
    assert least == pytest.approx(10, abs=1) and most == pytest.approx(90, abs=1)


def test_a_time_is_told_over_its_floor_and_a_rate_under_it(figures):
    assert figures.Figure("b", "step", "ms", [3.0], floor=2.0).over_floor == 1.5
    assert figures.Figure("a", "tokens", "1/s", [200.0], floor=300.0, is_rate=True).over_floor == 1.5
    assert figures.Figure("b", "host", "us", [3.0]).over_floor is None


def test_a_row_has_as_many_cells_as_the_head(figures):
    row = figures.Figure("a", "output tokens", "1/s", [25_000.4, 25_100.0], floor=36_000.0, is_rate=True).row()
    assert row == "| a | output tokens | 25,050 | 25,000 to 25,100 | 1/s | 36,000 | 1.437 |"
    assert row.count("|") == figures.HEAD.count("|")


def test_a_part_that_fails_leaves_the_figures_of_the_others(figures, tmp_path, capsys):
    report = figures.Report("found", tmp_path, {"device": "some"})
    report.add([figures.Figure("a", "step", "ms", [1.0])])
    report.fail("b", RuntimeError("no memory"))
    failed = "part b failed: RuntimeError: no memory"
    told = json.loads((tmp_path / "found.json").read_text())
    assert [one["median"] for one in told["figures"]] == [1.0] and told["errors"] == [failed]
    page = (tmp_path / "found.md").read_text()
    for line in ("- device: some", "| a | step | 1 |  | ms |  |  |", failed):
        assert line in page.splitlines()
    assert capsys.readouterr().out == "| a | step | 1 |  | ms |  |  |\n"
