"""`run=plugins`: what is installed, what of it can be used here, what is broken, and the health of this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata

from framework.config import COMPONENT_GROUPS, Config
from framework.discovery import OURS
from framework.errors import PluginError, class_and_text
from framework.plugins import ComponentSpec, Registry, registry
from framework.runs import RunArgs
from framework.runs.table import table
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread
from framework.words import RUN_TEXTS

HEADER = ("kind", "name", "distribution", "version", "api", "state")
_EXTRA = re.compile(r"""([A-Za-z0-9][\w.-]*).*;.*\bextra *== *['"]([\w.-]+)['"]""")


def run(config: Config, args: RunArgs) -> None:
    """Prints the table of components, the plugins that failed, what is not installed, and the health of the machine."""
    refuse_texts("plugins", args, dict.fromkeys(RUN_TEXTS, "leave it out"))
    refuse_unread("plugins", args, OF_BENCH)
    cores = _cores()  # before torch is imported, whose threads bind this one to a core
    found = registry()
    sections = (
        component_lines(found, config), hook_lines(found), failure_lines(found), check_lines(found),
        missing_lines(found), health_lines(cores),
    )  # fmt: skip
    for line in (line for lines in sections for line in lines):
        print(line)


def component_lines(found: Registry, config: Config) -> list[str]:
    """A table: one line a component, with `active` for what the config selects and the reason for what is unusable.

    Every usable component is imported: what cannot be is `broken`.
    """
    active = active_components(found, config)
    rows = [(spec.kind, spec.name, spec.dist, found.versions.get(spec.dist, "?"), ".".join(map(str, spec.api)),
             _state(found, spec, active)) for spec in found.specs()]  # fmt: skip
    return table([HEADER, *rows])


def active_components(found: Registry, config: Config) -> set[tuple[str, str]]:
    """(kind, name) of what this config would build; a model and a loader left at `auto` depend on the checkpoint.

    Observers are chosen by being installed: an engine builds each one that is announced.
    """
    chosen = {kind: getattr(config, group).name for group, kind in COMPONENT_GROUPS.items()}
    chosen |= {
        "scheduler": config.scheduler.name,
        "model": config.model.name,
        "loader": config.engine.load_format,
    }
    for kind in ("backend", "attention"):
        if chosen[kind] == "auto":
            chosen[kind] = found.auto(kind).name
    stages = (("stage", stage.name) for stage in config.sampler.stages)
    observers = (("observer", spec.name) for spec in found.specs("observer"))
    return {*chosen.items(), *stages, *observers, ("run", "plugins")}


def hook_lines(found: Registry) -> list[str]:
    """Plugins that hear of the engine's events, or choose its backend, without a component of that name."""
    lines = [f"  {plugin}: {', '.join(names)}" for plugin, names in found.hooks().items()]
    return ["", "hooks:", *lines] if lines else []


def failure_lines(found: Registry) -> list[str]:
    """Broken plugins, each quoted in full; empty when there is none."""
    return ["", "left out:", *(f"  {failure}" for failure in found.failures)] if found.failures else []


def check_lines(found: Registry) -> list[str]:
    """How to hold each component of others against the contract of its kind, where the kind has a suite."""
    from framework.testing.kits import KITS

    names = [f"{spec.kind}/{spec.name}" for spec in found.specs() if spec.kind in KITS and spec.dist != OURS]
    return ["", "to check:", *(f"  python -m framework check {name}" for name in names)] if names else []


def missing_lines(found: Registry) -> list[str]:
    """Extras of the plugins' distributions that are not installed whole, and how to install them.

    An extra that gathers others is left out.
    """
    lines = []
    for dist in found.versions:
        extras = _extras(dist)
        for extra, names in extras.items():
            gathers = sum(set(names) > set(others) for others in extras.values()) > 1
            missing = [] if gathers else [name for name in names if not _is_installed(name)]
            if missing:
                lines.append(f"  {', '.join(missing)}: pip install '{dist}[{extra}]'")
    return ["", "not installed, and only what needs it is missed:", *lines] if lines else []


def _extras(dist: str) -> dict[str, list[str]]:
    """{extra: names of the distributions it installs}."""
    try:
        required = metadata.requires(dist) or []
    except metadata.PackageNotFoundError:  # a plugin without a distribution of its own, as in a test
        return {}
    found: dict[str, list[str]] = {}
    for name, extra in (match.groups() for line in required if (match := _EXTRA.match(line))):
        if name != dist:
            found.setdefault(extra, []).append(name)
    return found


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def health_lines(cores: int) -> list[str]:
    """Versions and resources of this machine, one a line. cores: those that this process may use."""
    import torch

    facts = {
        "python": f"{platform.python_version()} on {sys.platform} {platform.machine()}",
        "torch": torch.__version__,
        "threads": f"{torch.get_num_threads()} of torch, on {cores} cores",
        "free memory": _free_memory(),
    }
    return ["", "health:", *table(list(facts.items()), indent="  ")]


def _state(found: Registry, spec: ComponentSpec, active: set[tuple[str, str]]) -> str:
    reason = found.usable(spec.kind, spec.name)
    if reason is not None:
        return f"unusable: {reason}"
    try:
        found.load_target(spec.kind, spec.name)
    except PluginError as error:
        return f"broken: {error}"
    except Exception as error:  # whatever somebody's module raises when it is imported
        return f"broken: {class_and_text(error)}"
    return "active" if (spec.kind, spec.name) in active else "usable"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_memory() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return "unknown on this system"
    return f"{available_kib / 2**20:.1f} GiB"
