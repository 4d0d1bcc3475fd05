"""`run=plugins`: what is installed, what of it can be used here, what is broken, and the health of this machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence

from framework.config import Config
from framework.plugins import ComponentSpec, Registry, registry
from framework.runs import RunArgs

HEADER = ("kind", "name", "distribution", "version", "state")


def run(config: Config, args: RunArgs) -> None:
    """Prints the table of components, the plugins that failed, and the health lines to stdout."""
    found = registry()
    for line in (*component_lines(found, config), *failure_lines(found), *health_lines()):
        print(line)


def component_lines(found: Registry, config: Config) -> list[str]:
    """A table: one line a component, with `active` for what the config selects and the reason for what is unusable."""
    active = active_components(found, config)
    rows = [(spec.kind, spec.name, spec.dist, found.versions.get(spec.dist, "?"), _state(found, spec, active))
            for spec in found.specs()]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    return [_padded(row, widths) for row in (HEADER, *rows)]


def active_components(found: Registry, config: Config) -> set[tuple[str, str]]:
    """(kind, name) of what this config would build; a model and a loader left at `auto` depend on the checkpoint.

    Observers are chosen by being installed: an engine builds each one that is announced.
    """
    chosen = {
        "policy": config.policy.name,
        "scheduler": config.scheduler.name,
        "executor": config.executor.name,
        "model": config.model.name,
        "loader": config.engine.load_format,
        "backend": config.backend.name,
        "attention": config.attention.name,
    }
    for kind in ("backend", "attention"):
        if chosen[kind] == "auto":
            chosen[kind] = found.auto(kind).name
    stages = (("stage", stage.name) for stage in config.sampler.stages)
    observers = (("observer", spec.name) for spec in found.specs("observer"))
    return {*chosen.items(), *stages, *observers, ("run", "plugins")}


def failure_lines(found: Registry) -> list[str]:
    """Broken plugins, each quoted in full; empty when there is none."""
    return ["", "left out:", *(f"  {failure}" for failure in found.failures)] if found.failures else []


def health_lines() -> list[str]:
    """Versions and resources of this machine, one a line."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "python": f"{platform.python_version()} on {sys.platform} {platform.machine()}",
        "torch": torch.__version__,
        "threads": f"{torch.get_num_threads()} of torch, on {cores} cores",
        "free memory": _free_memory(),
    }
    return ["", "health:", *(f"  {name:<12} {value}" for name, value in facts.items())]


def _state(found: Registry, spec: ComponentSpec, active: set[tuple[str, str]]) -> str:
    reason = found.usable(spec.kind, spec.name)
    if reason is not None:
        return f"unusable: {reason}"
    return "active" if (spec.kind, spec.name) in active else "usable"


def _free_memory() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return "unknown on this system"
    return f"{available_kib / 2**20:.1f} GiB"


def _padded(cells: Sequence[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
