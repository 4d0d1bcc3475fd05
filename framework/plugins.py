"""The typed registry of components and the hooks that announce them. Imports no torch.

A component is chosen by (kind, name); its target is imported only when it is selected.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "backend", "attention", "model", "scheduler", "policy", "stage", "drafter", "grammar",
    "kv_connector", "executor", "loader", "observer", "run", "bench",
)  # fmt: skip


@dataclass(frozen=True)
class ComponentSpec:
    """What a plugin announces about one component: names only, so that announcing imports nothing heavy.

    target    "package.module:attribute", imported when the component is selected
    config    "package.module:Dataclass" of its options, from a module that imports no torch
    extra     name of the extra that installs its optional dependencies: pip install 'DIST[EXTRA]'
    probe     "package.module:function" -> None if usable on this machine, else the reason
    priority  `auto` takes the usable component of the highest priority
    provides  what it serves beside its name: architectures of a model, file formats of a loader
    dist      distribution that announced it; the registry fills it in
    """

    kind: str
    name: str
    target: str
    config: str | None = None
    extra: str | None = None
    probe: str | None = None
    priority: int = 0
    provides: tuple[str, ...] = ()
    api: tuple[int, int] = (1, 0)
    dist: str = "?"
