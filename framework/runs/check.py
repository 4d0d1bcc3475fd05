"""`run=check`: holds components against the contract of their kind, and says what became of each check.

`check stage/min_p` one component, `check policy` a kind, `check all` everything that has a suite. The suites are in
`framework.testing`; nothing of a model is loaded but what a suite makes itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from framework.config import build_options
from framework.errors import ConfigError, PluginError, did_you_mean
from framework.plugins import KINDS, ComponentSpec, Registry, registry
from framework.runs import Incomplete
from framework.runs.options import CheckOptions
from framework.runs.table import table, terminal_width, title
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.runs import RunArgs
    from framework.testing.checking import Outcome
    from framework.testing.kits import Suite

ALL = "all"
_LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Report:
    """What became of one component. error: why nothing of it could be checked, with outcomes left empty."""

    spec: ComponentSpec
    origin: str
    outcomes: Sequence[Outcome]
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.spec.kind}/{self.spec.name}"

    @property
    def has_failed(self) -> bool:
        return self.error is not None or any(one.result == "failed" for one in self.outcomes)


def run(config: Config, args: RunArgs) -> Mapping[str, float]:
    """Prints a report, or one JSON object with `run.json=true`. Raises Incomplete when a check fails."""
    refuse_texts("check", args, dict.fromkeys(("prompt", "system", "prompts_file", "output"), _LEAVE_OUT))
    refuse_unread("check", args, OF_BENCH)
    options = build_options(CheckOptions, args.options, "run")
    plugins = registry()
    wanted = components(args.target, plugins)
    reports = []
    for spec in tqdm(wanted, desc="check", unit="component", disable=None if len(wanted) > 1 else True, leave=False):
        reports.append(checked(plugins, spec, alone=len(wanted) == 1))
        if not options.json:
            print("\n".join(report_lines(plugins, reports[-1])), end="\n\n", flush=True)
    counts = Counter(one.result for report in reports for one in report.outcomes)
    if options.json:
        print(json.dumps([_jsonable(plugins, report) for report in reports], indent=1, ensure_ascii=False))
    failed = [report.name for report in reports if report.has_failed]
    metrics = {word: float(counts[word]) for word in ("passed", "failed", "skipped")}
    if failed:
        raise Incomplete(f"{', '.join(failed)} fails what its contract asks for", metrics)
    return metrics


def components(target: str | None, plugins: Registry) -> list[ComponentSpec]:
    """What `KIND/NAME`, `KIND` or `all` means. ConfigError for anything else, PluginError for an unknown name."""
    from framework.testing.kits import KITS

    kinds = ", ".join(KITS)
    if not target:
        raise ConfigError(f"check needs to know what: check KIND/NAME, check KIND or check all. Kinds: {kinds}")
    if target == ALL:
        return [spec for kind in KITS for spec in plugins.specs(kind)]
    kind, slash, name = target.rpartition("/") if "/" in target else (target, "", "")
    kind = {"sampler/stage": "stage", "spec_decode": "drafter"}.get(kind, kind)
    if kind not in KINDS:
        raise ConfigError(
            f"target={target}: there is no kind {kind!r}.{did_you_mean(kind, [*KITS, ALL])} Write KIND/NAME, KIND or"
            f" all. Kinds: {kinds}"
        )
    if kind not in KITS:
        raise ConfigError(f"target={target}: components of kind {kind} have no contract suite. Kinds with one: {kinds}")
    return [plugins.spec(kind, name)] if slash else plugins.specs(kind)


def checked(plugins: Registry, spec: ComponentSpec, alone: bool) -> Report:
    """Runs the suite of one component. alone: it is the only one, and what stands in the way is the user's error."""
    from framework.testing.checking import run_check
    from framework.testing.kits import suite_of

    try:
        suite = suite_of(plugins, spec.kind, spec.name)
    except (ConfigError, PluginError) as error:
        if alone:
            raise
        return Report(spec, "", (), str(error))
    bar = tqdm(suite.checks, desc=f"check {spec.kind}/{spec.name}", disable=None if alone else True, leave=False)
    return Report(spec, suite.origin, _merged(suite, [run_check(check, case) for check, case in bar]))


def _merged(suite: Suite, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """One outcome a check: the first of its cases that fails, else one that passes, else the first."""
    rank = {"failed": 0, "passed": 1, "skipped": 2}
    best: dict[str, Outcome] = {}
    for one in outcomes:
        if one.check not in best or rank[one.result] < rank[best[one.check].result]:
            best[one.check] = one
    seconds = Counter[str]()
    for one in outcomes:
        seconds[one.check] += one.seconds  # type: ignore[assignment]  # a Counter sums floats as well
    return [type(one)(one.check, one.result, one.reason, seconds[one.check]) for one in best.values()]


def report_lines(plugins: Registry, report: Report) -> list[str]:
    """A line a check, with the reason of what failed or was skipped."""
    spec, width = report.spec, terminal_width()
    head = f"{report.name} of {spec.dist} {plugins.versions.get(spec.dist, '?')}"
    if report.error is not None:
        return [title(head), *table([("not checked", report.error)], width, "  ")]
    rows = [(one.result, f"{one.seconds:.2f} s", one.check, one.reason) for one in report.outcomes]
    counts = Counter(one.result for one in report.outcomes)
    total = ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped") if counts[word])
    return [title(f"{head}, {report.origin}"), *table(rows, width, "  "), f"  {total}"]


def _jsonable(plugins: Registry, report: Report) -> dict[str, Any]:
    spec = report.spec
    return {
        "kind": spec.kind,
        "name": spec.name,
        "distribution": spec.dist,
        "version": plugins.versions.get(spec.dist, "?"),
        "cases": report.origin,
        "error": report.error,
        "checks": [asdict(one) for one in report.outcomes],
    }
