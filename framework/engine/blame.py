"""Whose code raised: the innermost frame of an error that belongs to a plugin or to us decides.

A part of the engine runs in another one's call, so that where an error comes through says little. Called when something
has failed, never in a step that goes well.
"""

from __future__ import annotations

from traceback import walk_tb
from typing import TYPE_CHECKING

from framework.discovery import OURS

if TYPE_CHECKING:
    from framework.plugins import ComponentSpec, Registry


def culprit(error: BaseException, plugins: Registry) -> str | None:
    """`executor 'slow' of acme 1.2` when a third party's code raised, None when ours, torch's or nobody's did."""
    owners = {_package(spec.target): spec for spec in plugins.specs()}
    frames = [(f.f_globals.get("__name__", ""), f.f_code.co_qualname) for f, _ in walk_tb(error.__traceback__)][::-1]
    known = [_package(module) for module, _ in frames if _package(module) in owners]
    if not known or owners[known[0]].dist == OURS:
        return None
    spec = _announced_class(frames, plugins) or owners[known[0]]
    return plugins.label(spec)


def _package(dotted: str) -> str:
    return dotted.partition(":")[0].partition(".")[0]


def _announced_class(frames: list[tuple[str, str]], plugins: Registry) -> ComponentSpec | None:
    """The third party's component in whose method the error was raised, the innermost one, or None."""
    targets = {spec.target: spec for spec in plugins.specs() if spec.dist != OURS}
    names = [f"{module}:{qualname.partition('.')[0]}" for module, qualname in frames]
    return next((targets[name] for name in names if name in targets), None)
