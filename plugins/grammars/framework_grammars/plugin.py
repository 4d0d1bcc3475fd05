"""What framework_grammars announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            "grammar",
            "xgrammar",
            "framework_grammars.xgrammar:XGrammar",
            config="framework_grammars.options:XGrammarOptions",
            extra="grammar",
            probe="framework_grammars.probes:xgrammar",
            priority=20,
        ),
        ComponentSpec(
            "grammar",
            "llguidance",
            "framework_grammars.llguidance:LLGuidance",
            config="framework_grammars.options:LLGuidanceOptions",
            extra="grammar",
            probe="framework_grammars.probes:llguidance",
            priority=10,
        ),
    ]
