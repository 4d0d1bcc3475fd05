"""Whether sampler stages go together: kinds, order, and what each needs from the others and keeps for them.

Solved once, before weights load. Every conflict names both sides and a way out. Called by `build_pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.sampling.deployed import Deployed

RANK = {"mask": 0, "elementwise": 0, "threshold": 1, "select": 2}
AMONG_STAGES = frozenset({"argmax", "kept_set", "deterministic"})
"""Words that stages grant one another; the other words are granted, or asked for, by the engine."""


def check_composition(
    stages: Sequence[Deployed], required: frozenset[str] = frozenset(), provided: frozenset[str] = frozenset()
) -> None:
    """ConfigError for the first conflict of stages in pipeline order.

    required  words that the engine's configuration asks every stage to keep: batch_invariant, async, drafts, graph_safe
    provided  words that the engine grants to stages which need them: host_tokens, exact_lens
    """
    _check_select(stages)
    _check_order(stages)
    _check_masks(stages)
    for one in stages:
        _check_needs(one, stages, provided)
        for word in sorted(required - one.spec.caps.keeps):
            raise ConfigError(
                f"sampler stage '{one.key}' does not keep '{word}', which the engine is configured for."
                f" Remove it with sampler.stages.{one.key}=null, or turn '{word}' off"
            )


def _check_select(stages: Sequence[Deployed]) -> None:
    keys = [s.key for s in stages if s.spec.kind == "select"]
    if not keys:
        raise ConfigError(
            f"the sampler pipeline ({', '.join(s.key for s in stages) or 'no stage'}) has no select stage, so nothing"
            " picks a token. Add one, for example +sampler/stage=gumbel"
        )
    if len(keys) > 1:
        raise ConfigError(
            f"sampler stages '{keys[0]}' and '{keys[1]}' both pick the token, and only one may."
            f" Remove one: sampler.stages.{keys[0]}=null or sampler.stages.{keys[1]}=null"
        )


def _check_order(stages: Sequence[Deployed]) -> None:
    ordered = [s for s in stages if s.spec.kind in RANK]  # observers see the end of the step wherever they stand
    for before, after in pairwise(ordered):
        if RANK[after.spec.kind] < RANK[before.spec.kind]:
            raise ConfigError(
                f"sampler stage '{after.key}' ({after.spec.kind}) changes logits after '{before.key}'"
                f" ({before.spec.kind}) has decided on them. Move it: +sampler.stages.{after.key}.before={before.key}"
            )


def _check_masks(stages: Sequence[Deployed]) -> None:
    """Of stages that change logits behind a mask the pipeline itself keeps the masked tokens out."""
    mask = None
    for one in stages:
        if one.spec.kind == "mask":
            mask = one
        elif mask and one.spec.kind == "select" and not one.keeps("kept_set"):
            raise ConfigError(
                f"sampler stage '{one.key}' does not keep 'kept_set' and may pick a token that '{mask.key}' forbids."
                f" Remove one: sampler.stages.{one.key}=null or sampler.stages.{mask.key}=null, or declare 'kept_set'"
                " if it picks kept tokens only"
            )


def _check_needs(one: Deployed, stages: Sequence[Deployed], provided: frozenset[str]) -> None:
    for word in sorted(one.spec.caps.needs - provided):
        if word not in AMONG_STAGES:
            raise ConfigError(
                f"sampler stage '{one.key}' needs '{word}', which this engine does not provide."
                f" Remove it with sampler.stages.{one.key}=null"
            )
        for other in stages:
            if other is not one and other.spec.kind != "observe" and not other.keeps(word):
                raise ConfigError(
                    f"sampler stage '{one.key}' needs '{word}', which stage '{other.key}' does not keep."
                    f" Remove one: sampler.stages.{one.key}=null or sampler.stages.{other.key}=null"
                )
