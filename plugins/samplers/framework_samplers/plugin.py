"""What framework_samplers announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec("stage", "min_tokens", "framework_samplers.min_tokens:MinTokens"),
        ComponentSpec("stage", "temperature", "framework_samplers.temperature:Temperature"),
        ComponentSpec("stage", "min_p", "framework_samplers.min_p:MinP"),
        ComponentSpec("stage", "top_k", "framework_samplers.top_k:TopK"),
        ComponentSpec("stage", "top_p", "framework_samplers.top_p:TopP"),
        ComponentSpec("stage", "greedy", "framework_samplers.greedy:Greedy"),
        ComponentSpec("stage", "gumbel", "framework_samplers.gumbel:Gumbel"),
    ]
