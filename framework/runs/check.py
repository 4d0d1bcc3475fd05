"""`run=check`: holds components against the contract of their kind, and says what became of each check.

`check stage/min_p` one component, `check policy` a kind, `check all` everything that has a suite. The suites are in
`framework.testing`; nothing of a model is loaded but what a suite makes itself.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from framework.config import build_options
from framework.errors import ConfigError, PluginError, did_you_mean
from framework.plugins import KINDS, ComponentSpec, Registry, registry
from framework.runs import Incomplete
from framework.runs.options import CheckOptions
from framework.runs.signals import raised_signals
from framework.runs.table import paragraph, table, terminal_width, title, wrapped
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.runs import RunArgs
    from framework.testing.checking import Outcome
    from framework.testing.kits import Suite

ALL = "all"
LEAST_REASON = 40
"""Columns that a reason has beside its check, else it stands below."""
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
    say = _silent if options.json else _say
    reports = [reported(plugins, spec, say, alone=len(wanted) == 1) for spec in wanted]
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


def reported(plugins: Registry, spec: ComponentSpec, say: Callable[[str], None], *, alone: bool) -> Report:
    """Runs the suite of one component; `say` gets each line of the report as soon as it is known.

    alone: it is the only one, and what stands in the way is the user's error.
    """
    from framework.testing.kits import suite_of

    head = f"{spec.kind}/{spec.name} of {spec.dist} {plugins.versions.get(spec.dist, '?')}"
    try:
        with redirect_stdout(sys.stderr):
            suite = suite_of(plugins, spec.kind, spec.name)
    except (ConfigError, PluginError) as error:
        if alone:
            raise
        _say_all(say, [title(head), *table([("not checked", str(error))], terminal_width(), "  "), ""])
        return Report(spec, "", (), str(error))
    say(title(f"{head}, {suite.origin}"))
    outcomes = list(_outcomes(suite, say))
    counts = Counter(one.result for one in outcomes)
    total = ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped") if counts[word])
    _say_all(say, [f"  {total}", ""])
    return Report(spec, suite.origin, outcomes)


def _outcomes(suite: Suite, say: Callable[[str], None]) -> Iterator[Outcome]:
    """One outcome a check, whatever the number of its cases. What a component prints goes to stderr: stdout is ours."""
    from framework.testing.checking import name_of, run_check

    pairs: dict[str, list[tuple[Any, Any]]] = {}
    for check, case in suite.checks:
        pairs.setdefault(name_of(check), []).append((check, case))
    longest, width = max(map(len, pairs)), terminal_width()
    told: dict[str, str] = {}
    with tqdm(total=len(pairs), disable=None, leave=False) as bar:
        for name, own in pairs.items():
            bar.set_description(f"{suite.spec.kind}/{suite.spec.name}: {name}")
            try:
                with _interruptible(), redirect_stdout(sys.stderr):
                    outcome = _merged([(case, run_check(check, case)) for check, case in own])
            except KeyboardInterrupt:
                say(f"  stopped in {name}")
                raise
            first = told.setdefault(outcome.reason, name) if outcome.result == "failed" else name
            shown = outcome if first == name else replace(outcome, reason=f"as {first}")
            _say_all(say, outcome_lines(shown, longest, width))
            bar.update()
            yield outcome


def _interruptible() -> AbstractContextManager[None]:
    """A signal, which elsewhere ends a program at once, raises: a check that hangs is named."""
    return raised_signals() if threading.current_thread() is threading.main_thread() else nullcontext()


def _merged(outcomes: Sequence[tuple[Any, Outcome]]) -> Outcome:
    """Of the cases of a check: the first that fails, else one that passes, with what was skipped beside it, else the
    first."""
    rank = {"failed": 0, "passed": 1, "skipped": 2}
    first = min((one for _, one in outcomes), key=lambda one: rank[one.result])
    beside = [f"{case.name} skipped: {one.reason}" for case, one in outcomes if one.result == "skipped"]
    reason = "; ".join(beside) if first.result == "passed" else first.reason
    return replace(first, reason=reason, seconds=sum(one.seconds for _, one in outcomes))


def outcome_lines(outcome: Outcome, longest: int, width: int | None) -> list[str]:
    """The line of a check, with the reason of what failed or was skipped; on a narrow terminal that stands below.

    longest: letters of the longest name among the checks, so that reasons stand in a column
    """
    start = f"  {outcome.result:<7}  {outcome.seconds:5.2f} s  {outcome.check}"
    left = len(start) - len(outcome.check) + longest + 2
    if not outcome.reason:
        lines = [start]
    elif width is None or left + LEAST_REASON <= width:
        room = None if width is None else width - left
        first, *more = wrapped(outcome.reason, room)
        lines = [start.ljust(left) + first, *(" " * left + piece for piece in more)]
    else:
        lines = [start, *paragraph(outcome.reason, width, " " * 11)]
    return [title(line) for line in lines] if outcome.result == "failed" else lines


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stdout)  # above the bar, which is on the same terminal
    sys.stdout.flush()


def _silent(line: str) -> None:
    """Nothing but JSON goes to stdout."""


def _say_all(say: Callable[[str], None], lines: Sequence[str]) -> None:
    for line in lines:
        say(line)


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
