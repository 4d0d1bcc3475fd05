"""What framework_connectors announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            "kv_connector",
            "memory",
            "framework_connectors.memory:MemoryConnector",
            config="framework_connectors.options:MemoryOptions",
            cases="framework_connectors.cases:MEMORY",
        ),
    ]
