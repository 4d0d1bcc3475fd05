"""The page and the dashboard speak of the metrics that there are, with the labels that they have."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from framework.engine.stats import OVERHEAD_PARTS
from framework.server.metrics_buckets import Buckets
from framework.server.metrics_engine import OUTCOMES, REASONS, EngineMetrics, Snapshot
from framework.server.metrics_http import HttpCounts
from framework.server.metrics_names import engine_families, http_families
from framework.server.metrics_slo import Objectives

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "dashboards" / "grafana.json").read_text(encoding="utf-8"))
ROW = re.compile(r"^\| `(framework:\w+)` \| (\w+) \| ([^|]*)\|", re.MULTILINE)
SELECTOR = re.compile(r"((?:framework:|process_)\w+)(?:\{([^}]*)\})?")
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
OF_PROMETHEUS = {"instance", "job", "le"}


def families():
    """All families, each with a sample at least."""
    counts = dict.fromkeys(("num_running", "num_waiting", "num_preemptions"), 0)
    counts |= dict.fromkeys(("prefix_query_tokens", "prefix_hit_tokens", "connector_hit_tokens"), 0)
    metrics = EngineMetrics(Objectives(1.0, 1.0, 1.0))
    http = HttpCounts()
    http.begin()
    http.end("GET", "/metrics", "200", 0.001)
    snapshot = Snapshot(
        facts=dict.fromkeys(("model", "backend", "attention", "dtype"), "x"),
        counts={**counts, "num_free_blocks": 1, "num_blocks": 2},
        totals=dict.fromkeys(("prefill_tokens", "decode_tokens", "prefill_s", "decode_s"), 0),
        part_s=dict.fromkeys((*OVERHEAD_PARTS, "forward", "sample", "wait"), 0.0),
        step_tokens=Buckets((1,)),
        num_steps=0,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        reasons=dict.fromkeys(REASONS, 0),
        outcomes=dict.fromkeys(OUTCOMES, 0),
        histograms=metrics._histograms,
    )
    return [*engine_families(snapshot, metrics.objectives, "m", "1"), *http_families(http.read())]


FAMILIES = families()
SAMPLES = {sample.name for family in FAMILIES for sample in family.samples}
LABELS = {
    sample.name: {name for s in family.samples if s.name == sample.name for name in s.labels}
    for family in FAMILIES
    for sample in family.samples
}
VALUES = {
    (sample.name, label): {s.labels[label] for s in family.samples if label in s.labels}
    for family in FAMILIES
    for sample in family.samples
    for label in sample.labels
}
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_no_name_comes_twice():
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))


def test_page_lists_every_metric_with_its_type_and_labels():
    page = ROW.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    listed = {name: (kind, set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", labels)))) for name, kind, labels in page}
    there = {}
    for family in FAMILIES:
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        there[family.name + ("_total" if family.type == "counter" else "")] = (family.type, labels)
    assert listed == there


def test_dashboard_shows_something():
    assert len(EXPRESSIONS) > 40
    assert len({name for expression in EXPRESSIONS for name, _ in SELECTOR.findall(expression)}) > 25


@pytest.mark.parametrize("expression", sorted(set(EXPRESSIONS)))
def test_expression_of_the_dashboard_asks_for_what_there_is(expression):
    found = SELECTOR.findall(expression)
    assert found
    for name, matchers in found:
        assert name in SAMPLES | PROCESS
        for label, operator, wanted in re.findall(r"(\w+)(=~|!=|=)\"([^\"]*)\"", matchers):
            if label not in OF_PROMETHEUS:
                assert operator and set(wanted.split("|")) <= VALUES[name, label]
    for names in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", expression):
        known = OF_PROMETHEUS.union(*(LABELS.get(name, ()) for name, _ in found))
        assert {name.strip() for name in names.split(",")} <= known
    assert expression.count("(") == expression.count(")")


def test_legends_name_labels_that_their_expression_keeps():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {n.strip() for names in re.findall(r"by \(([^)]*)\)", target["expr"]) for n in names.split(",")}
            assert named <= kept | {"instance"}, panel["title"]


def test_panels_stand_beside_one_another():
    boxes = {panel["id"]: panel["gridPos"] for panel in DASHBOARD["panels"]}
    assert len(boxes) == len(DASHBOARD["panels"])
    for a, b in combinations(boxes.values(), 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert is_beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
        assert a["x"] + a["w"] <= 24
