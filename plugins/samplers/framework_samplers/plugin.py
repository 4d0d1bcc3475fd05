"""What framework_samplers announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec("stage", "allowed_ids", "framework_samplers.allowed_ids:AllowedIds"),
        ComponentSpec("stage", "grammar", "framework_samplers.grammar:GrammarMask"),
        ComponentSpec("stage", "min_tokens", "framework_samplers.min_tokens:MinTokens"),
        ComponentSpec("stage", "bad_words", "framework_samplers.bad_words:BadWords"),
        ComponentSpec("stage", "no_repeat_ngram", "framework_samplers.no_repeat_ngram:NoRepeatNgram"),
        ComponentSpec(
            "stage",
            "thinking_budget",
            "framework_samplers.thinking_budget:ThinkingBudget",
            config="framework_samplers.options:ThinkingBudgetConfig",
            cases="framework_samplers.cases:THINKING_BUDGET",
        ),
        ComponentSpec("stage", "logit_bias", "framework_samplers.logit_bias:LogitBias"),
        ComponentSpec("stage", "penalties", "framework_samplers.penalties:Penalties"),
        _with_options("dry", "framework_samplers.dry:Dry", "DryConfig"),
        ComponentSpec("stage", "temperature", "framework_samplers.temperature:Temperature"),
        ComponentSpec("stage", "dynamic_temperature", "framework_samplers.dynamic_temperature:DynamicTemperature"),
        ComponentSpec("stage", "min_p", "framework_samplers.min_p:MinP"),
        ComponentSpec("stage", "top_k", "framework_samplers.top_k:TopK"),
        ComponentSpec("stage", "top_p", "framework_samplers.top_p:TopP"),
        ComponentSpec("stage", "typical", "framework_samplers.typical:Typical"),
        ComponentSpec("stage", "top_n_sigma", "framework_samplers.top_n_sigma:TopNSigma"),
        ComponentSpec("stage", "epsilon", "framework_samplers.epsilon:Epsilon"),
        ComponentSpec("stage", "eta", "framework_samplers.eta:Eta"),
        _with_options("xtc", "framework_samplers.xtc:Xtc", "XtcConfig"),
        ComponentSpec("stage", "greedy", "framework_samplers.greedy:Greedy"),
        ComponentSpec("stage", "gumbel", "framework_samplers.gumbel:Gumbel"),
        ComponentSpec(
            "stage",
            "mirostat",
            "framework_samplers.mirostat:Mirostat",
            config="framework_samplers.options:MirostatConfig",
            cases="framework_samplers.cases:MIROSTAT",
        ),
        ComponentSpec("stage", "entropy", "framework_samplers.entropy:Entropy"),
        _with_options("chosen_ids", "framework_samplers.chosen_ids:ChosenIds", "ChosenIdsConfig"),
    ]


def _with_options(name: str, target: str, options: str) -> ComponentSpec:
    return ComponentSpec("stage", name, target, config=f"framework_samplers.options:{options}")
