"""What framework_loaders announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            "loader", "safetensors", "framework_loaders.safetensors:SafetensorsLoader", provides=(".safetensors",)
        ),
        ComponentSpec(
            "loader",
            "gguf",
            "framework_loaders.gguf:GgufLoader",
            provides=(".gguf",),
            cases="framework_loaders.cases:GGUF",
        ),
        ComponentSpec("loader", "dummy", "framework_loaders.dummy:DummyLoader"),
    ]
