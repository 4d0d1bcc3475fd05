"""What of an engine outlives its configuration: the checkpoint and the weights, as long as their keys stay the same.

`LLM.reconfigure` hands it from one build to the next; the builder puts it together and reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.config import Config
    from framework.interfaces import Backend, Checkpoint, Experts, LayerSpec, Loader, Model
    from framework.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model with its weights on its backend, and what was read of its checkpoint. config: what it was loaded for.

    experts  its mixtures of experts by the name of their block
    """

    config: Config
    checkpoint: Checkpoint
    loader: Loader
    tokenizer: Tokenizer | None
    backend: Backend
    model: Model
    layers: list[LayerSpec]
    experts: Mapping[str, Experts] = field(default_factory=dict)

    def forget_counts(self) -> None:
        """What experts were given so far was no request's."""
        for experts in self.experts.values():
            experts.counts.zero_()

    def serves(self, config: Config) -> bool:
        """Whether `config` would load the same weights for the same device in the same form."""
        return _keys(self, self.config) == _keys(self, config)


def _keys(loaded: Loaded, config: Config) -> tuple[object, ...]:
    """The keys that weights depend on; the seed is one where they are made and not read."""
    is_made = loaded.checkpoint.format == "dummy"
    engine = replace(
        config.engine,
        async_scheduling=None,
        seed=config.engine.seed if is_made else None,
        trace_prompts=True,
        trace_stages=False,
    )
    return config.model, config.backend, engine
