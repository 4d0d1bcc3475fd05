"""`run=check`: a readable report or JSON, exit code 1 when a check fails, 2 for what is not there."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest

from framework.errors import ConfigError
from framework.plugins import ComponentSpec, registry
from framework.runs import check
from framework.testing import kits
from framework.testing.checking import Outcome


def test_report_has_a_line_for_each_check_with_the_reason_of_what_was_skipped(typed_here):
    code, out, err = typed_here("check", "stage/temperature")
    assert (code, err) == (0, "")
    head, *lines, total, _ = out.splitlines()
    assert head == "stage/temperature of framework 0.1.0, cases derived from its contract"
    words = [line.split(maxsplit=3) for line in lines]
    assert {line[0] for line in words} == {"passed", "skipped"}
    shown = {line[3].split("  ")[0]: line for line in words}
    assert shown["shuffled batch"][0] == "passed"
    assert "the stage takes no extra_args" in shown["bad parameters are refused"][3]
    assert total.split(", ")[0].endswith("passed")


def test_skipped_case_beside_one_that_passes_is_told(typed_here, monkeypatch):
    from framework.testing.checking import Skipped

    def check_something(case):
        if "case 2" in case.name:
            raise Skipped("it is the second one")

    monkeypatch.setitem(kits.KITS, "model", replace(kits.KITS["model"], checks=(check_something,)))
    code, out, _ = typed_here("check", "model/qwen2")
    (line,) = [line for line in out.splitlines() if line.endswith("something") or " something " in line]
    assert code == 0 and line.split()[0] == "passed" and line.endswith("  Qwen2 (case 2) skipped: it is the second one")


def test_json_names_component_distribution_and_checks(typed_here):
    code, out, _ = typed_here("check", "stage/top_k", "run.json=true")
    (report,) = json.loads(out)
    assert (code, report["kind"], report["name"], report["distribution"]) == (0, "stage", "top_k", "framework")
    assert {one["result"] for one in report["checks"]} == {"passed", "skipped"}
    assert "engine gives equal tokens" in [one["check"] for one in report["checks"]]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["check"], "check needs to know what: check KIND/NAME, check KIND or check all."),
        (["check", "stage/minp"], "stage=minp: no installed plugin provides it. Did you mean 'min_p'?"),
        (["check", "stge/min_p"], "target=stge/min_p: there is no kind 'stge'. Did you mean 'stage'?"),
        (["check", "executor"], "target=executor: components of kind executor have no contract suite. Kinds with one:"),
        (["check", "stage/min_p", "prompt=x"], "prompt=x means nothing to run=check; leave it out"),
        (["check", "stage/min_p", "run.jsn=true"], "run.jsn: there is no such key. Did you mean 'json'?"),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_exit_code_2(typed_here, words, error):
    code, out, err = typed_here(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {error}") and err.count("\n") == 1


def test_broken_contract_is_told_and_ends_with_1(typed_here, monkeypatch):
    from framework_samplers.temperature import Temperature

    monkeypatch.setattr(Temperature, "apply", lambda self, logits, rows: logits.add_(1.0))
    code, out, err = typed_here("check", "stage/temperature")
    assert code == 1
    (line,) = [line.split(maxsplit=3) for line in out.splitlines() if "plain rows" in line]
    assert line[0] == "failed" and line[3].endswith("temperature: changes a row that did not want it")
    assert err == "error: stage/temperature fails what its contract asks for\n"


def test_what_a_component_prints_goes_to_stderr_and_leaves_json_whole(typed_here, monkeypatch):
    from framework_samplers.temperature import Temperature

    apply = Temperature.apply
    monkeypatch.setattr(Temperature, "apply", lambda self, logits, rows: (print("loud"), apply(self, logits, rows))[1])
    code, out, err = typed_here("check", "stage/temperature", "run.json=true")
    (report,) = json.loads(out)
    assert (code, report["name"]) == (0, "temperature")
    assert err.startswith("loud\n")


def test_lines_come_as_checks_end_and_an_interrupt_names_the_one_that_ran(typed_here, monkeypatch):
    def hangs(self, logits, rows):
        os.kill(os.getpid(), signal.SIGTERM)  # ends a program at once where nobody says otherwise
        time.sleep(60)

    from framework_samplers.temperature import Temperature

    monkeypatch.setattr(Temperature, "apply", hangs)
    code, out, err = typed_here("check", "stage/temperature")
    *lines, last = out.splitlines()
    assert (code, err) == (128 + signal.SIGTERM, "interrupted\n")
    assert lines[-1].startswith("  passed") and lines[-1].endswith("request is left alone")
    assert last == "  stopped in reused row keeps nothing"


def test_reason_that_several_checks_give_is_told_once(typed_here, monkeypatch):
    from framework_samplers.temperature import Temperature

    def breaks(self, logits, rows):
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(Temperature, "apply", breaks)
    code, out, _ = typed_here("check", "stage/temperature")
    failed = [line.split("  ")[-1].strip() for line in out.splitlines() if line.startswith("  failed")]
    assert code == 1 and failed[0].startswith("RuntimeError: out of cheese (test_check.py:")
    assert set(failed[1:-1]) == {"as reused row keeps nothing"}


@pytest.mark.parametrize(("width", "most"), [(60, 60), (80, 80), (200, 200), (None, 400)])
def test_reason_stands_beside_its_check_where_there_is_room_and_below_elsewhere(width, most):
    reason = "stage/x: this is what is wrong with it, " * 6
    outcome = Outcome("a check", "failed", reason.strip(), 12.5)
    first, *more = check.outcome_lines(outcome, 37, width)
    assert max(map(len, [first, *more])) <= most
    assert first.startswith("  failed   12.50 s  a check")
    assert ("stage/x" in first) == (width not in (60, 80))
    assert " ".join(line.strip() for line in [first, *more]).endswith(reason.strip())


def test_a_kind_means_all_of_its_components_and_all_means_every_kind_with_a_suite():
    plugins = registry()
    names = [spec.name for spec in check.components("stage", plugins)]
    assert names == [spec.name for spec in plugins.specs("stage")]
    everything = check.components("all", plugins)
    assert {spec.kind for spec in everything} == {spec.kind for spec in plugins.specs()} & set(kits.KITS)


def test_cases_of_another_class_are_refused(monkeypatch):
    plugins = registry()
    spec = ComponentSpec("stage", "min_p", "framework_samplers.min_p:MinP", cases="framework.testing.stages:CHECKS")
    monkeypatch.setitem(plugins._specs, ("stage", "min_p"), spec)
    with pytest.raises(ConfigError, match=r"framework\.testing\.stages:CHECKS must hold StageCases"):
        kits.suite_of(plugins, "stage", "min_p")
