"""The search for saturation finds the rate beyond which nothing is gained, and tries no more rates than it may."""

import pytest

from framework.runs.bench.serve.search import search


def tried(worth, start=1.0, max_points=12):
    seen = []

    def measured(rate):
        seen.append(rate)
        return worth(rate)

    best = search(measured, start, max_points)
    assert len(seen) == len(set(seen)) <= max_points and best in seen
    return best, seen


@pytest.mark.parametrize("limit", [3.0, 5.7, 20.0, 0.3])
def test_throughput_that_stops_growing_is_found_where_it_stops(limit):
    best, _ = tried(lambda rate: min(rate, limit), max_points=16)
    assert limit / 1.16 <= best <= limit * 1.16


@pytest.mark.parametrize("peak", [2.5, 11.0])
def test_goodput_that_falls_beyond_its_peak_is_found_near_it(peak):
    best, _ = tried(lambda rate: rate if rate <= peak else peak * (peak / rate) ** 3, max_points=16)
    assert peak / 1.3 <= best <= peak * 1.16


def test_rates_are_doubled_first():
    _, seen = tried(lambda rate: min(rate, 6.0))
    assert seen[:5] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("max_points", [3, 4, 7])
def test_no_more_points_than_allowed(max_points):
    _, seen = tried(lambda rate: rate, max_points=max_points)
    assert seen == [2.0**power for power in range(max_points)]


def test_server_that_answers_nothing_ends_the_search():
    best, seen = tried(lambda rate: 0.0)
    assert best == 1.0 and seen == [1.0, 2.0]
