"""The projections around attention: fused q/k/v, optional per-head norms, rotation, output.

Attention itself, paged and masked, is the plan's (`interfaces.AttentionPlan`), and norms and rotation of the heads are
too where it takes them (`interfaces.TakesProjections`); this module never sees a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from framework.interfaces import (
    ForwardContext,
    HeadNorms,
    Linear,
    ModelContext,
    Rotation,
    TakesLatentProjections,
    TakesProjections,
)
from framework.layers.head_order import reorder_heads
from framework.layers.linear import NormedLinear, load_linear
from framework.layers.norm import Factor, Norm, RMSNorm
from framework.layers.rope import Rotary


class Turn:
    """Rotation of a forward pass's tokens by one `Rotary`. cos, sin [T, 1, head_dim] are gathered when they are asked
    for, once."""

    __slots__ = ("_gathered", "_rotary", "rotation")

    def __init__(self, rotary: Rotary, positions: Tensor) -> None:
        self.rotation = Rotation(rotary.table, positions)
        self._rotary = rotary
        self._gathered: tuple[Tensor, Tensor] | None = None

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        if self._gathered is None:
            self._gathered = self._rotary(self.rotation.positions)
        return self._gathered


class ForwardPass:
    """What one forward pass gives to its layers: the plan of each, and how its tokens are rotated."""

    __slots__ = ("_takes_projections", "_turns", "ctx", "positions")

    def __init__(self, positions: Tensor, ctx: ForwardContext) -> None:
        self.positions, self.ctx = positions, ctx
        self._turns: dict[int, Turn] = {}
        self._takes_projections: dict[int, Any] = {}  # by id of the plan: asking costs more

    def takes_projections(self, layer: int) -> TakesProjections | None:
        """The plan of this layer when it normalises and rotates by itself, else None."""
        return self._if_it_is(TakesProjections, layer)

    def takes_latent_projections(self, layer: int) -> TakesLatentProjections | None:
        """The same of a latent layer."""
        return self._if_it_is(TakesLatentProjections, layer)

    def _if_it_is(self, protocol: type, layer: int) -> Any:
        """The layer's plan, or None; a group's layers are of one kind."""
        plan = self.ctx.plans[layer]
        if id(plan) not in self._takes_projections:
            self._takes_projections[id(plan)] = plan if isinstance(plan, protocol) else None
        return self._takes_projections[id(plan)]

    def turn(self, rotary: Rotary) -> Turn:
        """The rotation of the tokens; layers that share `rotary` share it."""
        turn = self._turns.get(id(rotary))
        if turn is None:
            turn = self._turns[id(rotary)] = Turn(rotary, self.positions)
        return turn


@dataclass(frozen=True)
class QKNorm:
    """RMS norms of queries and keys before the rotation (`q_norm`, `k_norm`): of each head, or, is_whole, of all
    heads of a token together. eps, factor: as of `RMSNorm`."""

    eps: float
    factor: Factor = "rounded"
    is_whole: bool = False


class Attention:
    """Grouped-query attention of one layer, declared to the backend at construction.

    rotary    how queries and keys are rotated, None for not at all
    bias      whether q, k and v have one; out_bias: whether the output product has, None for as they
    is_fused  the checkpoint has q, k and v as one tensor, `qkv_proj`, in this order
    products  the fused product and the output's, where a family loads them by itself
    qk_norm   norms of queries and keys, None for none
    scale     of the scores; None: head_dim ** -0.5
    window, softcap, sinks as in `interfaces.LayerSpec`; a window as long as max_model_len is none
    """

    __slots__ = (
        "_fuses_heads",
        "_head_norms",
        "_k_norm",
        "_num_all",
        "_num_rotated",
        "_out",
        "_q_norm",
        "_qkv",
        "_rotary",
        "_rotate",
        "_widths",
        "head_dim",
        "index",
    )

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary | None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: QKNorm | None = None,
        is_fused: bool = False,
        products: tuple[Linear, Linear] | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._widths = [num_heads, num_kv_heads, num_kv_heads]
        self._num_all, self._num_rotated = sum(self._widths), num_heads + num_kv_heads
        self.head_dim = head_dim
        self._rotary, self._rotate = rotary, ctx.backend.layer_ops.rotate
        if products is None:
            products = self._load_products(ctx, prefix, hidden_size, bias, out_bias, is_fused)
        self._qkv, self._out = NormedLinear(ctx, products[0]), products[1]
        self._load_norms(ctx, prefix, qk_norm)
        self.index = ctx.add_layer(
            "full" if window is None else "sliding",
            num_heads,
            num_kv_heads,
            head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def _load_products(
        self, ctx: ModelContext, prefix: str, hidden_size: int, bias: bool, out_bias: bool | None, is_fused: bool
    ) -> tuple[Linear, Linear]:
        parts = [
            (f"{prefix}.{name}_proj", width * self.head_dim) for name, width in zip("qkv", self._widths, strict=True)
        ]
        attended = parts[0][1]
        if is_fused:
            parts = [(f"{prefix}.qkv_proj", self._num_all * self.head_dim)]
        qkv = load_linear(ctx, parts, hidden_size, bias=bias, reorder=self._reordered)
        has_bias = bias if out_bias is None else out_bias
        return qkv, load_linear(ctx, [(f"{prefix}.o_proj", hidden_size)], attended, bias=has_bias)

    def _reordered(self, rows: Tensor) -> Tensor:
        """Rows of the stacked product with the heads that are rotated in the order in which kernels rotate them."""
        if self._rotary is None:
            return rows
        rotated, values = rows.split([self._num_rotated * self.head_dim, self._widths[2] * self.head_dim])
        moved = reorder_heads(rotated, self._rotary.order)
        return rows if moved is rotated else torch.cat((moved, values))

    def _load_norms(self, ctx: ModelContext, prefix: str, norm: QKNorm | None) -> None:
        self._q_norm, self._k_norm, self._head_norms = None, None, None
        # a plan normalises single heads, by weights of the model's dtype (`interfaces.HeadNorms`)
        self._fuses_heads = norm is None or (norm.factor == "rounded" and not norm.is_whole)
        if norm is None:
            return
        num_heads, num_kv_heads, _ = self._widths if norm.is_whole else (1, 1, 1)
        self._q_norm = RMSNorm(ctx, f"{prefix}.q_norm", num_heads * self.head_dim, norm.eps, norm.factor)
        self._k_norm = RMSNorm(ctx, f"{prefix}.k_norm", num_kv_heads * self.head_dim, norm.eps, norm.factor)
        if self._rotary is not None:
            for each in (self._q_norm, self._k_norm):
                each.weight = reorder_heads(each.weight, self._rotary.order)
        if self._fuses_heads:
            self._head_norms = HeadNorms(self._q_norm.weight, self._k_norm.weight, norm.eps)

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: Norm, step: ForwardPass, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block of norm(x + residual), x + residual), both [T, hidden_size], or [L, hidden_size] of the tokens that
        are wanted; the arguments' memory may be reused."""
        projected, residual = self._qkv.after_norm(x, residual, norm)
        heads = projected.view(-1, self._num_all, self.head_dim)
        turn = None if self._rotary is None else step.turn(self._rotary)
        fused = step.takes_projections(self.index) if self._fuses_heads else None
        if fused is not None:
            rotation = None if turn is None else turn.rotation
            attended = fused.forward_projections(self.index, heads, rotation, self._head_norms)
        else:
            attended = step.ctx.plans[self.index].forward(self.index, *self._turned(heads, turn))
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
        return self._out(attended.flatten(1)), residual

    def _turned(self, heads: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys normalised and rotated, and values, out of the fused product."""
        q, k, v = heads.split(self._widths, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = _normalised(self._q_norm, q), _normalised(self._k_norm, k)
        if turn is None:
            return q, k, v
        if self._q_norm is not None:
            return self._rotate(q, *turn.cos_sin), self._rotate(k, *turn.cos_sin), v
        # side by side in the fused product: one rotation for both
        q, k = self._rotate(heads[:, : self._num_rotated], *turn.cos_sin).split(self._widths[:2], dim=1)
        return q, k, v


def _normalised(norm: RMSNorm, heads: Tensor) -> Tensor:
    """heads [T, H, D], each by itself or all of a token together: as wide as the norm's weight is."""
    if len(norm.weight) == heads.shape[-1]:
        return norm(heads)
    return norm(heads.flatten(1)).view(heads.shape)
