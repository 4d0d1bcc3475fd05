"""What framework_schedulers announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec("policy", "fcfs", "framework_schedulers.policies:Fcfs"),
        ComponentSpec("policy", "priority", "framework_schedulers.policies:Priority"),
        ComponentSpec("policy", "shortest", "framework_schedulers.policies:Shortest"),
    ]
