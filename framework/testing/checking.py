"""What the contract suites of all kinds share: a check passes, fails, or says why it has nothing to check.

A check is a function of one case. It raises AssertionError when a duty is broken, and `Skipped` where it does not
apply. The suites, `run=check` and the pytest plugin use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal
from unittest import SkipTest

Check = Callable[[Any], None]


class Skipped(SkipTest):
    """A check that does not apply to the case, and why; pytest shows it as skipped."""


@dataclass(frozen=True)
class Outcome:
    """What became of one check. reason: what is broken, or why it was skipped."""

    check: str
    result: Literal["passed", "failed", "skipped"]
    reason: str
    seconds: float


def run_check(check: Check, case: Any) -> Outcome:
    """Runs one check; whatever it raises is its outcome."""
    start = perf_counter()
    result: Literal["passed", "failed", "skipped"] = "passed"
    reason = ""
    try:
        check(case)
    except Skipped as why:
        result, reason = "skipped", str(why)
    except AssertionError as broken:
        result, reason = "failed", str(broken)
    except Exception as error:  # a component that raises where it should not is what a check is there for
        result, reason = "failed", f"{type(error).__name__}: {error}"
    return Outcome(name_of(check), result, " ".join(reason.split()), perf_counter() - start)


def run_checks(checks: Iterable[Check], case: Any) -> Iterator[Outcome]:
    """One outcome a check, as they come."""
    for check in checks:
        yield run_check(check, case)


def assert_all(checks: Iterable[Check], case: Any) -> None:
    """Runs the checks in their order. Raises what the first broken one raises; skipped ones raise nothing."""
    for check in checks:
        try:
            check(case)
        except Skipped:
            continue


def name_of(check: Check) -> str:
    """`check_kept_set` as a report shows it: kept set."""
    return str(getattr(check, "__name__", check)).removeprefix("check_").replace("_", " ")
