"""What the contract suites of all kinds share: a check passes, fails, or says why it has nothing to check.

A check is a function of one case. It raises AssertionError when a duty is broken, and `Skipped` where it does not
apply. The suites, `run=check` and the pytest plugin use this.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal
from unittest import SkipTest

import torch

from framework.errors import class_and_text, in_one_line

Check = Callable[[Any], None]


class Skipped(SkipTest):
    """A check that does not apply to the case, and why; pytest shows it as skipped."""


@dataclass(frozen=True)
class Outcome:
    """What became of one check. reason: what is broken, or why it was skipped, also for some of several cases."""

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
        result, reason = "failed", f"{broken}{'' if _is_of_a_suite(broken) else _place_of(broken)}"
    except (Exception, SystemExit) as error:  # a component that raises where it should not is what a check is there for
        result, reason = "failed", f"{class_and_text(error)}{_place_of(error)}"
    return Outcome(name_of(check), result, in_one_line(reason), perf_counter() - start)


def _is_of_a_suite(broken: AssertionError) -> bool:
    """Whether a check says it, and not the component itself, or the engine when the component calls it wrongly."""
    last = traceback.extract_tb(broken.__traceback__)[-1]
    return Path(last.filename).is_relative_to(Path(__file__).parent)


def _place_of(error: BaseException) -> str:
    """Where in the component an error was raised, as ` (component.py:22 in apply)`; empty where it was not there."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_others(Path(frame.filename))]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def _is_of_others(file: Path) -> bool:
    """Whether a frame says nothing about a component: torch, framework, the standard library."""
    is_installed = "site-packages" in file.parts
    return (
        file.name.startswith("<")
        or any(file.is_relative_to(folder) for folder in _OTHERS)
        or (file.is_relative_to(_LIBRARY) and not is_installed)
    )


_OTHERS = (Path(torch.__file__).parent, Path(__file__).parents[1])
_LIBRARY = Path(traceback.__file__).parent


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
