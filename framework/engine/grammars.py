"""The engine's grammar: which plugin serves structured output, and why none does where there is none.

Nothing of it is imported or built here: the first request that needs it does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.errors import ConfigError, PluginError, shown
from framework.interfaces import Capabilities, Grammar, GrammarContext
from framework.structured.grammars import Grammars, NoGrammars, Setting

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.admission import Limits
    from framework.engine.choice import Part
    from framework.plugins import Registry
    from framework.tokenizer import Tokenizer


def grammars_of(
    config: Config, plugins: Registry, tokenizer: Tokenizer | None, limits: Limits, scheduler: Part
) -> Grammars | NoGrammars:
    """What serves `structured_outputs`. PluginError for a grammar that is named and cannot be used, ConfigError for
    options that it does not have, and for a `reasoning_end` that is no token, or ends requests."""
    chosen = config.grammar
    if chosen.name == "none":
        if chosen.reasoning_end is not None:
            raise ConfigError(
                f"grammar.reasoning_end={shown(chosen.reasoning_end)} has no use with grammar=none. Leave it out, or "
                "use grammar=auto"
            )
        return NoGrammars("this engine runs with grammar=none. Use grammar=auto")
    try:
        name = plugins.auto("grammar").name if chosen.name == "auto" else plugins.spec("grammar", chosen.name).name
    except PluginError as error:
        if chosen.name != "auto":
            raise
        return NoGrammars(str(error))
    reason = plugins.usable("grammar", name)
    if reason is not None:
        raise PluginError(f"grammar={name} cannot be used here: {reason}")
    options = plugins.build_options("grammar", name, chosen.options)
    if tokenizer is None:
        return NoGrammars("the model has no tokenizer, and a grammar is about text. Set model.tokenizer")
    if "grammars" not in getattr(scheduler.target, "caps", Capabilities()).keeps:
        return NoGrammars(f"scheduler={scheduler.name} does not serve grammars (caps). Use scheduler=default")
    setting = Setting(tokenizer, limits.vocab_size, limits.eos_token_ids, _think_end(config, tokenizer, limits))

    def build(ctx: GrammarContext) -> Grammar:
        grammar: Grammar = plugins.load_target("grammar", name)(options, ctx)
        return grammar

    return Grammars(name, plugins.label(plugins.spec("grammar", name)), build, setting, chosen.max_compiled)


def _think_end(config: Config, tokenizer: Tokenizer, limits: Limits) -> int | None:
    text = config.grammar.reasoning_end
    if text is None:
        return None
    token = tokenizer.token_to_id(text)
    if token is None:
        raise ConfigError(
            f"grammar.reasoning_end={shown(text)} is no token of the model's vocabulary. Name the one that ends its "
            "thinking, such as </think>"
        )
    if token in limits.eos_token_ids:
        raise ConfigError(
            f"grammar.reasoning_end={shown(text)} is an eos of the model, which ends requests. Name the token that "
            "ends its thinking, such as </think>"
        )
    return token
