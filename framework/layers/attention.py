"""The projections around attention: fused q/k/v, optional per-head norms, rotation, output.

Attention itself, paged and masked, is the plan's (`interfaces.AttentionPlan`), and norms and rotation of the heads are
too where it takes them (`interfaces.TakesProjections`); this module never sees a KV cache.
"""

from __future__ import annotations

from torch import Tensor

from framework.interfaces import AttentionPlan, HeadNorms, ModelContext, Rotation, TakesProjections
from framework.layers.linear import NormedLinear, load_linear
from framework.layers.norm import RMSNorm
from framework.layers.rope import Rotary


class AttentionStep:
    """What a forward pass gives to every attention layer of a group: the plan and its tokens' rotation.

    takes_projections  the plan when it normalises and rotates by itself, else None
    cos, sin           [T, 1, head_dim], only for a plan that does not: gathered once a forward pass
    """

    __slots__ = ("cos", "plan", "rotation", "sin", "takes_projections")
    cos: Tensor
    sin: Tensor

    def __init__(self, plan: AttentionPlan, rotary: Rotary, positions: Tensor) -> None:
        self.plan, self.rotation = plan, Rotation(rotary.table, positions)
        self.takes_projections = plan if isinstance(plan, TakesProjections) else None
        if self.takes_projections is None:
            self.cos, self.sin = rotary(positions)


class Attention:
    """Grouped-query attention of one layer, declared to the backend at construction.

    bias         whether q, k, v and the output product have one
    qk_norm_eps  not None: q and k are RMS-normalised over head_dim before the rotation (`q_norm`, `k_norm`)
    """

    __slots__ = (
        "_head_norms",
        "_k_norm",
        "_num_all",
        "_num_rotated",
        "_out",
        "_q_norm",
        "_qkv",
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
        bias: bool,
        qk_norm_eps: float | None = None,
        group: str = "full",
    ) -> None:
        q, kv = num_heads * head_dim, num_kv_heads * head_dim
        parts = [(f"{prefix}.q_proj", q), (f"{prefix}.k_proj", kv), (f"{prefix}.v_proj", kv)]
        self._qkv = NormedLinear(ctx, load_linear(ctx, parts, hidden_size, bias=bias))
        self._out = load_linear(ctx, [(f"{prefix}.o_proj", hidden_size)], q, bias=bias)
        self._head_norms = None
        if qk_norm_eps is not None:
            self._q_norm = RMSNorm(ctx, f"{prefix}.q_norm", head_dim, qk_norm_eps)
            self._k_norm = RMSNorm(ctx, f"{prefix}.k_norm", head_dim, qk_norm_eps)
            self._head_norms = HeadNorms(self._q_norm.weight, self._k_norm.weight, qk_norm_eps)
        self._rotate = ctx.backend.layer_ops.rotate
        self._widths = [num_heads, num_kv_heads, num_kv_heads]
        self._num_all, self._num_rotated = sum(self._widths), num_heads + num_kv_heads
        self.head_dim = head_dim
        self.index = ctx.add_layer(group, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: RMSNorm, step: AttentionStep, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block of norm(x + residual), x + residual), both [T, hidden_size], or [L, hidden_size] of the tokens that
        are wanted; the arguments' memory may be reused."""
        projected, residual = self._qkv.after_norm(x, residual, norm)
        heads = projected.view(-1, self._num_all, self.head_dim)
        if step.takes_projections is not None:
            attended = step.takes_projections.forward_projections(self.index, heads, step.rotation, self._head_norms)
        else:
            attended = step.plan.forward(self.index, *self._turned(heads, step.cos, step.sin))
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
        return self._out(attended.flatten(1)), residual

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys normalised and rotated, and values, out of the fused product."""
        q, k, v = heads.split(self._widths, dim=1)
        if self._head_norms is not None:
            q, k = self._rotate(self._q_norm(q), cos, sin), self._rotate(self._k_norm(k), cos, sin)
        else:  # side by side in the fused product: one rotation for both
            q, k = self._rotate(heads[:, : self._num_rotated], cos, sin).split(self._widths[:2], dim=1)
        return q, k, v
