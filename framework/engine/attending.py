"""Which attention plugin serves an engine: its capabilities against the model's layers, the configuration, the backend.

A choice outside of them is refused with both sides' names and a plugin that would serve. Called while parts are chosen;
how layers are put into KV groups is told in `kv_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.engine.choice import Part
    from framework.interfaces import AttentionCaps, LayerSpec
    from framework.plugins import ComponentSpec, Registry


def unserved(caps: AttentionCaps, layers: Sequence[LayerSpec]) -> str | None:
    """What of the layers a plugin of these capabilities does not serve; None when it serves all of them."""
    for layer in layers:
        is_latent = layer.value_dim is not None
        wrong = (
            (is_latent and not caps.latent, "latent attention"),
            (caps.latent and not is_latent, "layers that are not latent"),
            (bool(caps.head_dims) and layer.head_dim not in caps.head_dims, f"head_dim {layer.head_dim}"),
            (layer.window is not None and not caps.window, "sliding windows"),
            (layer.softcap is not None and not caps.softcap, "soft caps of scores"),
            (layer.sinks is not None and not caps.sinks, "attention sinks"),
        )
        what = next((text for is_wrong, text in wrong if is_wrong), None)
        if what is not None:
            return what
    return None


def unfit(plugins: Registry, layers: Sequence[LayerSpec]) -> Callable[[ComponentSpec], str | None]:
    """For `Registry.auto`: why a usable attention plugin does not serve a model of these layers."""

    def reason(spec: ComponentSpec) -> str | None:
        what = unserved(plugins.load_target("attention", spec.name).caps, layers)
        return None if what is None else f"it does not serve {what}, which the model has"

    return reason


def check_layers(
    attention: Part, model: str, layers: Sequence[LayerSpec], plugins: Registry, device: str | None
) -> None:
    """ConfigError when the plugin does not serve what the model's layers are. device: type of the backend's."""
    what = unserved(attention.target.caps, layers)
    if what is None:
        return
    reason = unfit(plugins, layers)
    others = [
        spec.name
        for spec in plugins.specs("attention")
        if not (plugins.misfit("attention", spec.name, device) or plugins.usable("attention", spec.name))
        and reason(spec) is None
    ]
    way_out = f"Use attention={others[0]}" if others else "No attention plugin that can be used here does"
    raise ConfigError(f"attention={attention.name} does not serve {what}, which model={model} has. {way_out}")
