"""The projections around latent attention: low-rank queries, one shared latent and rotated key a token, output.

Attention itself, and whether it expands latents or absorbs what expands them, is the plan's (`interfaces.LatentPlan`),
and the norm of latents and the rotation are too where it takes them (`interfaces.TakesLatentProjections`). This module
never sees a KV cache; models with multi-head latent attention put it in the place of `layers.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, cat

from framework.interfaces import LatentNorm, LatentUp, Linear, ModelContext
from framework.layers.attention import ForwardPass
from framework.layers.head_order import half_split_order, reorder_heads
from framework.layers.linear import NormedLinear, load_linear, stack_rows
from framework.layers.norm import Norm, RMSNorm
from framework.layers.rope import Rotary

INNER_EPS = 1e-6
"""Of the norms of query and latent, whatever `rms_norm_eps` says: checkpoints were trained with it."""


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention, named as in DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    query_rank  of the low-rank query, None where queries are one product of the hidden state
    rank        of the latent that is kept of a token, beside one rotated key of rope_dim for all heads
    nope_dim, rope_dim, value_dim  of a head: its key that is not rotated, its rotated one, its value
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """Of a head's query and its expanded key."""
        return self.nope_dim + self.rope_dim


def attention_scale(key_dim: int, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Factor of the scores: key_dim^-0.5, times (0.1 m ln(factor) + 1)^2 where YaRN extends the context by `factor`
    and m, the config's `mscale_all_dim`, is not 0. Source: YaRN (arXiv 2309.00071), section 3.4, as DeepSeek-V2 has it.
    """
    mscale = 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0
    return float(key_dim**-0.5 * mscale**2)


class LatentAttention:
    """Multi-head latent attention of one layer, declared to the backend at construction.

    bias        whether the products of the hidden state into a low rank, and the output product, have one
    neighbours  whether the checkpoint rotates neighbouring dimensions, else those half of rope_dim apart
    """

    __slots__ = (
        "_down", "_inner_norm", "_latent_norm", "_out", "_query_norm", "_query_up", "_rotary", "_rotate", "_sizes",
        "_widths", "index", "up",
    )  # fmt: skip

    def __init__(
        self, ctx: ModelContext, prefix: str, sizes: LatentSizes, *, rotary: Rotary, scale: float, bias: bool,
        neighbours: bool,
    ) -> None:  # fmt: skip
        s = self._sizes = sizes
        order = half_split_order(s.rope_dim, neighbours=neighbours)
        self._down = NormedLinear(ctx, _load_down(ctx, prefix, s, order, bias=bias))
        self._query_norm = self._query_up = None
        if s.query_rank is not None:
            self._query_norm = RMSNorm(ctx, f"{prefix}.q_a_layernorm", s.query_rank, INNER_EPS)
            weight = ctx.weights.take(f"{prefix}.q_b_proj.weight", (s.num_heads * s.key_dim, s.query_rank))
            product = ctx.backend.pack_linear(reorder_heads(weight, _behind(s.nope_dim, order)))
            self._query_up = NormedLinear(ctx, product)
        self._latent_norm = RMSNorm(ctx, f"{prefix}.kv_a_layernorm", s.rank, INNER_EPS)
        self._inner_norm = LatentNorm(self._latent_norm.weight, INNER_EPS)
        self.up = _load_up(ctx, f"{prefix}.kv_b_proj.weight", s)
        self._out = load_linear(ctx, [(f"{prefix}.o_proj", s.hidden_size)], s.num_heads * s.value_dim, bias=bias)
        self._widths = [s.query_rank or s.num_heads * s.key_dim, s.rank + s.rope_dim]
        self._rotary, self._rotate = rotary, ctx.backend.layer_ops.rotate
        self.index = ctx.add_layer("latent", s.num_heads, 1, s.rank + s.rope_dim, scale, value_dim=s.rank)

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: Norm, step: ForwardPass, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block of norm(x + residual), x + residual), both [T, hidden_size], or [L, hidden_size] of the tokens that
        are wanted; the arguments' memory may be reused."""
        projected, residual = self._down.after_norm(x, residual, norm)
        q, latent = projected.split(self._widths, dim=1)
        attended = self._attend(q, latent, step)
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
        return self._out(attended.flatten(1)), residual

    def _attend(self, q: Tensor, latent: Tensor, step: ForwardPass) -> Tensor:
        """[T, num_heads, value_dim] of what the first product gives."""
        if self._query_norm is not None and self._query_up is not None:
            q, _ = self._query_up.after_norm(q, None, self._query_norm)
        q = q.view(-1, self._sizes.num_heads, self._sizes.key_dim)
        turn, fused = step.turn(self._rotary), step.takes_latent_projections(self.index)
        if fused is not None:
            return fused.forward_latent_projections(self.index, q, latent, turn.rotation, self._inner_norm, self.up)
        rotated = q[..., self._sizes.nope_dim :]  # in the memory of the product, which is ours
        rotated.copy_(self._rotate(rotated, *turn.cos_sin))
        latent, key = latent.split((self._sizes.rank, self._sizes.rope_dim), dim=1)
        key = self._rotate(key.unsqueeze(1), *turn.cos_sin).squeeze(1)
        latent = cat((self._latent_norm(latent), key), dim=1)
        attended: Tensor = step.ctx.plans[self.index].forward_latent(self.index, q, latent, self.up)
        return attended


def _behind(first: int, order: Sequence[int]) -> list[int]:
    """`order` of the dimensions behind the first ones, which stay where they are."""
    return [*range(first), *(first + place for place in order)]


def _load_down(ctx: ModelContext, prefix: str, s: LatentSizes, order: Sequence[int], *, bias: bool) -> Linear:
    """Query, latent and key as one product of the hidden state. A query that is not low-rank has no bias."""

    def rows_of(name: str, rows: int, order: Sequence[int], *, bias: bool) -> tuple[Tensor, Tensor]:
        weight = ctx.weights.take(f"{prefix}.{name}.weight", (rows, s.hidden_size))
        biases = ctx.weights.take(f"{prefix}.{name}.bias", (rows,)) if bias else weight.new_zeros(rows)
        return reorder_heads(weight, order), reorder_heads(biases, order)

    if s.query_rank is None:
        query = rows_of("q_proj", s.num_heads * s.key_dim, _behind(s.nope_dim, order), bias=False)
    else:
        query = rows_of("q_a_proj", s.query_rank, range(s.query_rank), bias=bias)
    latent = rows_of("kv_a_proj_with_mqa", s.rank + s.rope_dim, _behind(s.rank, order), bias=bias)
    weights, biases = ([one, other] for one, other in zip(query, latent, strict=True))
    return ctx.backend.pack_linear(stack_rows(weights), stack_rows(biases) if bias else None)


def _load_up(ctx: ModelContext, name: str, s: LatentSizes) -> LatentUp:
    """The two halves of each head's expansion, each in memory of its own: plans multiply by one at a time."""
    rows = s.nope_dim + s.value_dim
    heads = ctx.weights.take(name, (s.num_heads * rows, s.rank)).view(s.num_heads, rows, s.rank)
    keys, values = heads.split((s.nope_dim, s.value_dim), dim=1)
    return LatentUp(keys.contiguous(), values.contiguous())
