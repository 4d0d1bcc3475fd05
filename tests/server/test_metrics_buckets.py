"""Histograms that take lists: counts and sums are those of values that come one by one, and of prometheus-client."""

import pytest
from prometheus_client import CollectorRegistry, Histogram

from framework.server.metrics_buckets import Buckets

BOUNDS = (0.5, 1, 2.5)
VALUES = [0.1, 0.5, 0.50001, 1.0, 2.0, 2.5, 2.6, 100.0, 0.0, 1.0]


@pytest.mark.parametrize("num_values", [0, 1, 7, 8, 10])  # few are taken one by one
def test_list_counts_as_its_values_do(num_values):
    theirs = Histogram("h", "h", buckets=BOUNDS, registry=CollectorRegistry())
    ours = Buckets(BOUNDS)
    ours.add_all(VALUES[:num_values])
    for value in VALUES[:num_values]:
        theirs.observe(value)
    samples = {sample.labels.get("le", sample.name): sample.value for sample in theirs.collect()[0].samples}
    assert dict(ours.cumulative()) == {le: samples[le] for le in ("0.5", "1.0", "2.5", "+Inf")}
    assert ours.sum == pytest.approx(samples["h_sum"], rel=1e-15)


def test_value_may_come_many_times_at_once():
    once, often = Buckets(BOUNDS), Buckets(BOUNDS)
    once.add(0.75, times=3)
    often.add_all([0.75] * 3)
    assert (once.counts, once.sum) == (often.counts, often.sum)


def test_copy_keeps_its_counts():
    buckets = Buckets(BOUNDS)
    copy = buckets.copy()
    buckets.add_all(VALUES)
    assert (sum(copy.counts), copy.sum) == (0, 0.0)


def test_bounds_that_do_not_rise_are_our_fault():
    with pytest.raises(AssertionError, match="do not rise"):
        Buckets((1, 1))
