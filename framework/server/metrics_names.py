"""What the metrics are called: from what an engine and the HTTP side count to families of prometheus-client.

Names follow vLLM where it has the same number, with `framework:` before them. Nothing is counted here.
`docs/metrics.md` lists them, and `dashboards/grafana.json` shows them; tests hold both to this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from framework.server.metrics_buckets import Buckets
    from framework.server.metrics_engine import Snapshot
    from framework.server.metrics_http import HttpSnapshot
    from framework.server.metrics_slo import Objectives

PREFIX = "framework:"
_HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", "Arrival of a request to its first token."),
    "itl": ("inter_token_latency_seconds", "Each gap between two tokens of one completion."),
    "tpot": ("time_per_output_token_seconds", "Mean gap of a served request, tokens after the first."),
    "e2e": ("e2e_request_latency_seconds", "Arrival of a served request to its end."),
    "queue": ("request_queue_time_seconds", "Arrival of a request to its first step."),
    "prefill": ("request_prefill_time_seconds", "First step of a request to its first token."),
    "decode": ("request_decode_time_seconds", "First token of a served request to its end."),
    "prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a served request."),
    "generation_tokens": ("request_generation_tokens", "Tokens that a served request was given, by all completions."),
}
_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Completions that were put back to wait, for blocks of others."),
    "prefix_query_tokens": ("prefix_cache_queries", "Tokens that were looked up in the prefix cache."),
    "prefix_hit_tokens": ("prefix_cache_hits", "Tokens that were found in the prefix cache."),
    "connector_hit_tokens": ("connector_hits", "Tokens that a KV connector brought."),
}
_GAUGES = {
    "num_running": ("num_requests_running", "Completions that are in the batch."),
    "num_waiting": ("num_requests_waiting", "Completions that wait for a place in the batch."),
}


def engine_families(snapshot: Snapshot, objectives: Objectives, model: str, version: str) -> Iterator[Metric]:
    """model: as clients ask for it."""
    yield _info(snapshot, model, version)
    yield from _of_scheduler(snapshot.counts)
    yield from _of_steps(snapshot)
    yield from _of_requests(snapshot)
    yield _labelled_gauge("slo_seconds", "Objectives that were stated.", "objective", _in_seconds(objectives))


def http_families(snapshot: HttpSnapshot) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    requests = CounterMetricFamily(
        f"{PREFIX}http_requests", "Answers by route and status.", labels=["method", "route", "status"]
    )
    for labels, count in snapshot.answers.items():
        requests.add_metric(labels, count)
    yield requests
    latency = HistogramMetricFamily(
        f"{PREFIX}http_request_duration_seconds", "Request to the last byte of its answer.", labels=["method", "route"]
    )
    for place, buckets in snapshot.latency.items():
        latency.add_metric(place, buckets.cumulative(), buckets.sum)
    yield latency
    yield _gauge("http_requests_open", "Requests whose answer is not over.", snapshot.num_open)


def _info(snapshot: Snapshot, model: str, version: str) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    facts = snapshot.facts
    labels = {"model": model, "architecture": facts["model"], "version": version}
    labels |= {name: str(facts[name]) for name in ("backend", "attention", "dtype")}
    family = GaugeMetricFamily(f"{PREFIX}engine_info", "What the engine was built with.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _of_scheduler(counts: Mapping[str, float]) -> Iterator[Metric]:
    for key, (name, help_) in _GAUGES.items():
        yield _gauge(name, help_, counts[key])
    num_blocks = counts["num_blocks"] - 1  # the null block is nobody's
    used = 1 - counts["num_free_blocks"] / num_blocks
    yield _gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold, 0 to 1.", used)
    yield _gauge("kv_cache_blocks", "Blocks of the KV cache.", num_blocks)
    for key, (name, help_) in _COUNTERS.items():
        yield _counter(name, help_, counts[key])


def _of_steps(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.totals
    yield _counter("prompt_tokens", "Prompt tokens of requests whose first token came.", snapshot.num_prompt_tokens)
    yield _counter("prompt_tokens_cached", "Those of them that were not computed.", snapshot.num_cached_tokens)
    yield _counter("prefill_tokens", "Prompt tokens that steps computed.", totals["prefill_tokens"])
    yield _counter("generation_tokens", "Tokens that steps gave to requests.", totals["decode_tokens"])
    yield _counter("steps", "Steps of the engine.", snapshot.num_steps)
    seconds = {"prefill": totals["prefill_s"], "decode": totals["decode_s"]}
    yield _labelled_counter("step_seconds", "Time of steps with prompt tokens, and of all others.", "kind", seconds)
    yield _labelled_counter("step_part_seconds", "The host's time by part of a step.", "part", snapshot.part_s)
    yield _histogram("iteration_tokens_total", "Tokens that a step computed.", snapshot.step_tokens)


def _of_requests(snapshot: Snapshot) -> Iterator[Metric]:
    reasons, outcomes = snapshot.reasons, snapshot.outcomes
    yield _labelled_counter("request_success", "Completions that ended, by reason.", "finished_reason", reasons)
    yield _labelled_counter("slo_requests", "Requests that ended, by what became of them.", "outcome", outcomes)
    for key, (name, help_) in _HISTOGRAMS.items():
        yield _histogram(name, help_, snapshot.histograms[key])


def _in_seconds(objectives: Objectives) -> dict[str, float]:
    return {name.removesuffix("_ms"): value / 1e3 for name, value in objectives.stated().items()}


def _gauge(name: str, help_: str, value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(PREFIX + name, help_, value=value)


def _labelled_gauge(name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(PREFIX + name, help_, labels=[label]), values)


def _counter(name: str, help_: str, value: float) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(PREFIX + name, help_, value=value)


def _labelled_counter(name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(PREFIX + name, help_, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, help_: str, buckets: Buckets) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    return HistogramMetricFamily(PREFIX + name, help_, buckets=buckets.cumulative(), sum_value=buckets.sum)
