"""Rotary position embedding: frequencies of every supported `rope_type`, and cosines looked up once a forward pass.

Reads both config layouts (`rope_parameters`, and `rope_theta` with `rope_scaling`). The rotation itself is the
backend's (`LayerOps.rotate`). A type or a key that is not known here is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from framework.errors import CheckpointError, did_you_mean
from framework.interfaces import ModelContext
from framework.layers.head_order import half_split_order

DEFAULT_THETA = 10000.0
_ORIGINAL = "original_max_position_embeddings"  # the length before a scaling; `default` and `linear` have no use for it


@dataclass(frozen=True)
class RopeConfig:
    """The rotary part of a model config, in one layout.

    max_positions  the checkpoint's `max_position_embeddings`, None when it does not say
    options        keys of the rope type beside rope_type and rope_theta
    partial        which part of a head is rotated, its first dimensions
    """

    rope_type: str
    theta: float
    max_positions: int | None
    options: Mapping[str, Any]
    partial: float = 1.0

    def number(self, key: str, default: float | None = None) -> float:
        """Option `key` as a number above 0; CheckpointError when it is missing without a default, or another value."""
        value = self.options.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(
                f"rope_type '{self.rope_type}' needs '{key}'. Add it to rope_parameters in config.json."
            )
        return _number_above(0, key, value)

    @property
    def original_max_positions(self) -> float:
        return self.number(_ORIGINAL, self.max_positions)

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated; CheckpointError for an odd number of them, or none."""
        rotated = int(head_dim * self.partial)
        if rotated < 2 or rotated % 2:
            raise CheckpointError(
                f"partial_rotary_factor={self.partial} rotates {rotated} of head_dim={head_dim} dimensions; rotary "
                "embedding turns pairs. Correct config.json."
            )
        return rotated


def read_rope(
    config: Mapping[str, Any], *, layer_type: str | None = None, theta: float = DEFAULT_THETA, is_partial: bool = False
) -> RopeConfig:
    """The RopeConfig of a config.json of either layout. Raises CheckpointError for what is not known, by name.

    layer_type  whose rope_parameters are meant, of a family that has them a layer type
    theta       of a config that has none; is_partial: whether the family knows `partial_rotary_factor`
    """
    scaling = _parameters(config, layer_type)
    legacy = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or legacy or "default"
    base = _first(scaling.pop("rope_theta", None), config.get("rope_theta"), theta)
    partial = _first(scaling.pop("partial_rotary_factor", None), config.get("partial_rotary_factor"), 1.0)
    if config.get(_ORIGINAL) is not None and rope_type in ("llama3", "yarn", "longrope"):
        scaling[_ORIGINAL] = config[_ORIGINAL]
    _refuse_unknown(rope_type, scaling)
    length = config.get("max_position_embeddings")
    return RopeConfig(rope_type, _number_above(1, "rope_theta", base), length, scaling, _partial(partial, is_partial))


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next(value for value in values if value is not None)


def _parameters(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = config.get(key)
    if not isinstance(found, Mapping | None):
        raise CheckpointError(f"config.json: {key} must be an object with rope_type and its numbers, got {found!r}.")
    nested = [name for name, value in (found or {}).items() if isinstance(value, Mapping)]
    if nested and layer_type is None:
        raise CheckpointError(
            f"rope_parameters a layer type ({', '.join(nested)}) are not known to this family. Use another model."
        )
    if nested:
        assert found is not None
        found = found.get(layer_type)
        if not isinstance(found, Mapping):
            raise CheckpointError(f"config.json: {key} says nothing of {layer_type}, only of {', '.join(nested)}.")
    return dict(found or {})


def _number_above(least: float, key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and least < value < math.inf):  # NaN is above of nothing
        raise CheckpointError(f"rope_parameters.{key} must be a finite number above {least}, got {value!r}.")
    return float(value)


def _partial(factor: Any, is_known: bool) -> float:
    if not is_known and factor != 1:
        raise CheckpointError(
            f"partial_rotary_factor={factor} is not known to this family, only 1.0 is. Use another model."
        )
    found = _number_above(0, "partial_rotary_factor", factor)
    if found > 1:
        raise CheckpointError(f"rope_parameters.partial_rotary_factor must be at most 1, got {factor!r}.")
    return found


def _refuse_unknown(rope_type: str, scaling: Mapping[str, Any]) -> None:
    if not isinstance(rope_type, str) or rope_type not in _TYPES:
        known = sorted(set(_TYPES) - {"factors"})  # which a GGUF header says by itself
        raise CheckpointError(
            f"config.json: rope_type '{rope_type}' is not supported.{did_you_mean(str(rope_type), known)} "
            f"Supported: {', '.join(known)}. Use a checkpoint of one of these."
        )
    known_keys = _TYPES[rope_type].keys
    unknown = [key for key, value in scaling.items() if key not in known_keys and value is not None]
    if unknown:
        raise CheckpointError(
            f"rope_type '{rope_type}' does not know {', '.join(sorted(unknown))}. "
            f"It reads: {', '.join(sorted(known_keys)) or 'nothing'}. Correct rope_parameters in config.json."
        )


# At position 100,000 the last bit of a frequency turns a pair by a hundredth: the orders of operations below are those
# that checkpoints are trained and compared with.


def base_periods(theta: float, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: theta ** (2 i / head_dim). Source: RoFormer (arXiv 2104.09864), section 3.3."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def depends_on_length(config: Any) -> bool:
    """Whether keys are rotated otherwise where max_model_len is another: `longrope` somewhere in a config.json."""
    if not isinstance(config, Mapping):
        return False
    is_long = "longrope" in (config.get("rope_type"), config.get("type"))
    return is_long or any(depends_on_length(value) for value in config.values())


def base_frequencies(theta: float, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: the reciprocals of `base_periods`."""
    return 1.0 / base_periods(theta, head_dim)


def _default(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    return base_frequencies(rope.theta, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """All frequencies divided by `factor`. Source: position interpolation (arXiv 2306.15595)."""
    return base_frequencies(rope.theta, head_dim) / rope.number("factor"), 1.0


def _dynamic(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """The default frequencies, valid up to the checkpoint's own length.

    Beyond it the base would depend on the longest sequence of the batch, and keys in the cache would be rotated by
    other frequencies than new ones: a request's tokens would depend on its neighbours.
    """
    if rope.max_positions is None or length > rope.max_positions:
        raise CheckpointError(
            f"rope_type 'dynamic' is served up to max_position_embeddings={rope.max_positions}, "
            f"but max_model_len is {length}. Lower engine.max_model_len, or use rope_type 'yarn'."
        )
    return base_frequencies(rope.theta, head_dim), 1.0


def _llama3(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended.

    With r = original length / wavelength: kept above high_freq_factor, divided below low_freq_factor, and between them
    (1 - s) f / factor + s f with s = (r - low) / (high - low). Source: Llama 3.1 (arXiv 2407.21783) and its config.
    """
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"rope_parameters.low_freq_factor={low} must be below high_freq_factor={high}.")
    inv = base_frequencies(rope.theta, head_dim)
    turns = rope.original_max_positions / (2 * math.pi / inv)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv / factor + smooth * inv, 1.0


def _yarn(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Frequencies interpolated by `factor` where they turn slowly, kept where they turn fast, and cosines scaled.

    Source: YaRN (arXiv 2309.00071), section 3.2 (ramp between beta_fast and beta_slow turns) and 3.4 (scale).
    """
    original = rope.original_max_positions
    factor = rope.number("factor", rope.max_positions / original if rope.max_positions else None)
    bounds = [
        head_dim * math.log(original / (rope.number(key, turns) * 2 * math.pi)) / (2 * math.log(rope.theta))
        for key, turns in (("beta_fast", 32.0), ("beta_slow", 1.0))
    ]
    if rope.options.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], head_dim - 1)
    width = high - low or 0.001  # equal bounds would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    periods = base_periods(rope.theta, head_dim)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, _yarn_scale(rope, factor)


def _yarn_scale(rope: RopeConfig, factor: float) -> float:
    if rope.options.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.options.get("mscale") and rope.options.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def _longrope(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Frequencies divided by one factor each, of two lists, and cosines scaled by sqrt(1 + ln factor / ln original).

    `short_factor` counts for max_model_len up to the original length, `long_factor` beyond it, for every request of the
    engine: choosing by the length of a sequence would rotate new keys by other frequencies than those in the cache. A
    short prompt under a long max_model_len therefore differs from an implementation that chooses a call.
    Source: LongRoPE (arXiv 2402.13753), section 3.2; the scale is that of Phi-3 (arXiv 2404.14219).
    """
    original = rope.original_max_positions
    factor = rope.number("factor", rope.max_positions / original if rope.max_positions else None)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = _one_each(rope, "long_factor" if length > original else "short_factor", head_dim)
    return 1.0 / (divisors * base_periods(rope.theta, head_dim)), rope.number("attention_factor", scale)


def _factors(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Frequencies divided by one factor each: how a GGUF file stores a scaling (`rope_freqs.weight`)."""
    return base_frequencies(rope.theta, head_dim) / _one_each(rope, "factors", head_dim), 1.0


def _one_each(rope: RopeConfig, key: str, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: a number for each frequency."""
    found = rope.options.get(key)
    if not isinstance(found, list | tuple) or len(found) != head_dim // 2:
        raise CheckpointError(
            f"rope_parameters.{key} must hold {head_dim // 2} numbers, got {found!r:.60}. Convert the checkpoint again."
        )
    factors = [_number_above(0, f"{key}[{place}]", value) for place, value in enumerate(found)]
    return torch.tensor(factors, dtype=torch.float32)


@dataclass(frozen=True)
class _RopeType:
    """frequencies(rope, head_dim, longest position + 1) -> ([head_dim / 2] inverse frequencies, scale of cos, sin)."""

    frequencies: Callable[[RopeConfig, int, int], tuple[Tensor, float]]
    keys: frozenset[str] = frozenset()


_YARN_KEYS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _ORIGINAL)
_LONGROPE_KEYS = ("factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL)
_TYPES: dict[str, _RopeType] = {
    "default": _RopeType(_default, frozenset({_ORIGINAL})),
    "linear": _RopeType(_linear, frozenset({"factor", _ORIGINAL})),
    "dynamic": _RopeType(_dynamic, frozenset({"factor"})),
    "llama3": _RopeType(_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL})),
    "yarn": _RopeType(_yarn, frozenset(_YARN_KEYS)),
    "longrope": _RopeType(_longrope, frozenset(_LONGROPE_KEYS)),
    "factors": _RopeType(_factors, frozenset({"factors"})),
}


class Rotary:
    """cos and sin of every position below max_model_len, computed once in float32.

    order  [head_dim] dimensions of the checkpoint's heads in the order in which the table rotates them
    """

    __slots__ = ("order", "table")

    def __init__(self, ctx: ModelContext, rope: RopeConfig, head_dim: int) -> None:
        rotary_dim = rope.rotary_dim(head_dim)
        self.order = half_split_order(head_dim, rotary_dim)
        inv, scale = _TYPES[rope.rope_type].frequencies(rope, rotary_dim, ctx.max_model_len)
        num_positions = 1 if ctx.device.type == "meta" else ctx.max_model_len  # an outline rotates nothing
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv
        # One table, so that a forward pass gathers once; made on the host so that every device rotates alike.
        passed = (0, (head_dim - rotary_dim) // 2)
        cos = functional.pad(angles.cos() * scale, passed, value=1.0)
        sin = functional.pad(angles.sin() * scale, passed)
        self.table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(ctx.device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin, each [T, 1, head_dim] float32 in the layout of `LayerOps.rotate`."""
        cos, sin = self.table.index_select(0, positions).split(1, dim=1)
        return cos, sin
