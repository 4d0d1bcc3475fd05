"""A sampler stage as a pipeline holds it: built from its config, checked to do what its kind promises.

What a row holds before a stage writes it is decided here as well. Called when a pipeline is built and at admission.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from framework.config import build_options
from framework.errors import ConfigError, PluginError
from framework.sampling.guard import GuardedStage

if TYPE_CHECKING:
    from framework.config import StageConfig
    from framework.interfaces import StageContext, StageSpec
    from framework.plugins import Registry
    from framework.request import SamplingParams

    ContextFactory = Callable[[str, StageSpec], StageContext]

METHODS = {
    "mask": ("apply",), "elementwise": ("apply",), "threshold": ("bounds",), "select": ("select",),
    "observe": ("observe", "collect"),
}  # fmt: skip
ALWAYS = ("wants", "validate", "add_request", "commit")
FORBIDS = "forbidden_ids"
"""What a stage may have as well, see `interfaces.Forbids`."""
OPERANDS = "operands"
"""What a stage has that names a fused operation, see `interfaces.FusedStage`."""


@dataclass(frozen=True)
class Deployed:
    """key: its name in `sampler.stages`; bit: its place in the feature bits of a row.

    stage: a SamplerStage, which has the method of its own kind only: no class fits the protocol as a whole.
    """

    key: str
    spec: StageSpec
    stage: Any
    ctx: StageContext
    bit: int

    def keeps(self, word: str) -> bool:
        return word in self.spec.caps.keeps

    def reset_row(self, req_idx: int) -> None:
        """Neutral values in every field of the row: what a request that does not want the stage leaves there."""
        self.release(req_idx)
        for field in self.spec.fields:
            if not field.pooled:
                self.ctx.column(field.name).np[req_idx] = field.init

    def release(self, req_idx: int) -> None:
        """Gives back what the row has of pools."""
        for name in self._pooled:
            self.ctx.column(name).release(req_idx)

    @cached_property
    def _pooled(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.spec.fields if field.pooled)

    def view(self, params: SamplingParams) -> SamplingParams:
        """Parameters as the stage reads them: it looks for extra_args under its own name, the request uses the key."""
        if self.key == self.spec.name or not params.extra_args:
            return params
        own = params.extra_args.get(self.key)
        return params.replace(extra_args=None if own is None else {self.spec.name: own})

    def in_its_words(self, text: str) -> str:
        """What the stage says of its parameters and options, which it calls by its own name, under its key."""
        return re.sub(rf"\b(extra_args|sampler\.stages)\.{re.escape(self.spec.name)}\b", rf"\1.{self.key}", text)

    def forbidden_ids(self, params: SamplingParams) -> Collection[int]:
        """Ids that the stage never lets a request draw, see `interfaces.Forbids`."""
        ask = getattr(self.stage, FORBIDS, None)
        return () if ask is None or not self.stage.wants(self.view(params)) else ask(self.view(params))


def deploy(config: StageConfig, index: int, registry: Registry, ctx_factory: ContextFactory) -> Deployed:
    """Builds one stage. PluginError when it is not there or lacks a method, ConfigError when it refuses its options."""
    target = registry.load_target("stage", config.name)
    spec = _spec_of(config, target)
    ctx = ctx_factory(config.key, spec)
    try:
        stage = target(_options(config, registry), ctx)
    except ValueError as error:
        raise ConfigError(f"sampler.stages.{config.key}: {error}") from error
    label = registry.label(registry.spec("stage", config.name))
    optional = (FORBIDS,) if hasattr(stage, FORBIDS) else ()
    guarded = GuardedStage(stage, config.key, label, (*_methods(spec), *optional))
    return Deployed(config.key, spec, guarded, ctx, 1 << index)


def _spec_of(config: StageConfig, target: Any) -> StageSpec:
    spec = getattr(target, "spec", None)
    if spec is None or spec.kind not in METHODS:
        raise PluginError(
            f"sampler stage '{config.key}' (plugin '{config.name}') declares no StageSpec with a kind among"
            f" {', '.join(METHODS)}: set `spec` on {target!r}"
        )
    if spec.name != config.name:  # a request's extra_args would go under the one and be looked for under the other
        raise PluginError(
            f"sampler stage '{config.key}': the plugin is announced as '{config.name}' and its StageSpec says"
            f" '{spec.name}'. Give the ComponentSpec and the StageSpec of {target!r} one name"
        )
    missing = [name for name in _methods(spec) if not callable(getattr(target, name, None))]
    if missing:
        fuses = "" if spec.fused is None else f", fused as {spec.fused},"
        raise PluginError(
            f"sampler stage '{config.key}' (plugin '{config.name}') is of kind {spec.kind}{fuses} and lacks"
            f" {', '.join(missing)}: see framework.interfaces.SamplerStage"
        )
    return spec


def _methods(spec: StageSpec) -> tuple[str, ...]:
    return (*ALWAYS, *METHODS[spec.kind], *(() if spec.fused is None else (OPERANDS,)))


def _options(config: StageConfig, registry: Registry) -> Any:
    options_class = registry.load_config_class(registry.spec("stage", config.name))
    return build_options(options_class, config.options, f"sampler.stages.{config.key}")
