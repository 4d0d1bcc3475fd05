"""A model family on the bench: its case, weights that are made as they are asked for, and attention that reads nothing
but the token itself, so that whatever else reaches from one token to another shows.

The checks are in `models` and `model_engine`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from framework.engine.outline import layers_of
from framework.errors import CheckpointError
from framework.interfaces import (
    Backend,
    Checkpoint,
    ExpertWeights,
    ForwardContext,
    LatentUp,
    LayerSpec,
    Linear,
    ModelContext,
    ModelOutput,
    Routing,
)
from framework.layers import ops
from framework.layers.experts import ReferenceExperts

__all__ = ["MAX_LEN", "ModelCase"]

MAX_LEN = 64
"""Longest sequence that a model of a check is built for."""
_QUANTIZED = ("_blocks", "_scales", "_scale_inv")
"""Ends of names that quantized checkpoints have beside, or instead of, the tensor itself."""


@dataclass(frozen=True)
class ModelCase:
    """The family is built as target(config, ModelContext). config: of a tiny checkpoint, as in its config.json, with
    `architectures` and `vocab_size`. label: tells cases of one family apart."""

    target: Any
    config: Mapping[str, Any]
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.target.__name__}{f' ({self.label})' if self.label else ''}"

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(Path(self.name), "dummy", self.config)

    def keeps(self, word: str) -> bool:
        caps = getattr(self.target, "caps", None)
        return caps is None or word in caps.keeps

    def with_config(self, **edits: Any) -> ModelCase:
        """The same family with other keys; None drops one."""
        config = {key: value for key, value in {**self.config, **edits}.items() if value is not None}
        return ModelCase(self.target, config, self.label)


@dataclass
class RandomWeights:
    """`interfaces.WeightSource` that has every tensor it is asked for, and remembers what was taken.

    known  names that it has and no others; None: all but the head of a tied model and quantized forms
    """

    config: Mapping[str, Any]
    known: frozenset[str] | None = None
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        if self.known is not None:
            return name in self.known
        is_tied = self.config.get("tie_word_embeddings") and name.endswith("lm_head.weight")
        return not is_tied and not name.endswith(_QUANTIZED)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        if not self.has(name):
            raise CheckpointError(f"tensor '{name}' {list(shape)} is missing")
        assert name not in self.taken, f"{name} is taken twice: whoever needs it twice keeps it"
        self.taken[name] = tuple(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(tuple(shape), generator=generator) * 0.2
        if len(shape) == 1 and name.endswith("weight"):
            values += 1  # a norm's
        return values.to(dtype or torch.float32)

    def unused(self) -> list[str]:
        return [] if self.known is None else sorted(self.known - self.taken.keys())

    def close(self) -> None:
        """Holds nothing."""


class PlainBackend:
    """What a model asks of a backend, in plain torch."""

    name = "plain"
    device = torch.get_default_device()
    dtype = torch.float32
    layer_ops = ops

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return lambda x: functional.linear(x, weight, bias)

    def pack_experts(self, weights: ExpertWeights, routing: Routing) -> ReferenceExperts:
        return ReferenceExperts(weights, routing)


class OwnToken:
    """A plan for all layers: attention of a token to itself alone, which holds its query, its key and its value.

    called  layers in the order of their calls
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self.layers, self.called = layers, list[int]()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `interfaces.AttentionPlan`."""
        spec = self._enter(layer)
        _check_heads(spec, "queries", q, spec.num_heads)
        _check_heads(spec, "keys", k, spec.num_kv_heads)
        _check_heads(spec, "values", v, spec.num_kv_heads)
        share = spec.num_heads // spec.num_kv_heads
        keys, values = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        return values + _told(q + keys)

    def forward_latent(self, layer: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """As `interfaces.LatentPlan`."""
        spec = self._enter(layer)
        width = spec.head_dim
        assert spec.value_dim is not None, f"layer {layer} attends to latents, and was declared without value_dim"
        assert latent.shape[1:] == (width,), f"layer {layer}: latents of {tuple(latent.shape[1:])}, declared {width}"
        values = torch.einsum("hvr,tr->thv", up.values, latent[:, : spec.value_dim])
        return values + _told(q) + _told(latent).unsqueeze(1)

    def _enter(self, layer: int) -> LayerSpec:
        self.called.append(layer)
        return self.layers[layer]


def _check_heads(spec: LayerSpec, what: str, heads: Tensor, count: int) -> None:
    found, wanted = list(heads.shape[1:]), [count, spec.head_dim]
    assert found == wanted, f"layer {spec.index}: {what} of {found} a token, declared as {wanted}"


def _told(heads: Tensor) -> Tensor:
    """[..., D] -> [..., 1]: a number that every element moves."""
    return (heads * torch.linspace(-1, 1, heads.shape[-1])).mean(-1, keepdim=True)


class Built:
    """A model of a case over random weights, and its forward pass with tokens that stand alone."""

    def __init__(self, case: ModelCase, weights: RandomWeights | None = None) -> None:
        self.case, self.weights = case, weights or RandomWeights(case.config)
        backend = cast(Backend, PlainBackend())
        self.ctx = ModelContext(backend, self.weights, torch.float32, PlainBackend.device, MAX_LEN)
        self.model = case.target(case.config, self.ctx)
        self.plan = OwnToken(self.ctx.layers)

    @property
    def vocab_size(self) -> int:
        return int(self.case.config["vocab_size"])

    @property
    def num_layers(self) -> int:
        return len(self.ctx.layers)

    def run(self, ids: Tensor, positions: Tensor, **words: Any) -> ModelOutput:
        """words: of the `ForwardContext`."""
        ctx = ForwardContext([self.plan] * self.num_layers, **words)
        output: ModelOutput = self.model.forward(self.model.embed(ids), positions, ctx)
        return output

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model.compute_logits(self.run(ids, positions).hidden)
        return logits


def outline_of(case: ModelCase) -> list[LayerSpec]:
    """The layers that an engine knows of before it reads a weight. Raises PluginError as an engine does."""
    return layers_of(case.name, case.target, case.checkpoint, torch.float32, MAX_LEN, RandomWeights(case.config).has)


def tokens(count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """ids and positions [count], both in no order."""
    places = torch.arange(count)
    return (places * 7 + 3) % vocab_size, (places * 5 + 2) % MAX_LEN


def assert_near(found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Within `tolerance` of the largest value: float32 sums that may stand in another order."""
    assert found.shape == wanted.shape, f"{what}: shape {list(found.shape)} instead of {list(wanted.shape)}"
    apart, limit = float((found - wanted).abs().max()), tolerance * float(wanted.abs().max())
    assert apart <= limit, f"{what}: {apart:.2g} apart, more than {limit:.2g}"
