"""The projections around attention: fused q/k/v, optional per-head norms, rotation, output.

Attention itself, paged and masked, is the plan's (`interfaces.AttentionPlan`); this module never sees a KV cache.
"""

from __future__ import annotations

from torch import Tensor

from framework.interfaces import AttentionPlan, ModelContext
from framework.layers.linear import load_linear
from framework.layers.norm import RMSNorm


class Attention:
    """Grouped-query attention of one layer, declared to the backend at construction.

    bias         whether q, k, v and the output product have one
    qk_norm_eps  not None: q and k are RMS-normalised over head_dim before the rotation (`q_norm`, `k_norm`)
    """

    __slots__ = (
        "_num_all",
        "_num_rotated",
        "_out",
        "_qkv",
        "_rotate",
        "_widths",
        "head_dim",
        "index",
        "k_norm",
        "q_norm",
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
        self._qkv = load_linear(ctx, parts, hidden_size, bias=bias)
        self._out = load_linear(ctx, [(f"{prefix}.o_proj", hidden_size)], q, bias=bias)
        self.q_norm = RMSNorm(ctx, f"{prefix}.q_norm", head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(ctx, f"{prefix}.k_norm", head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self._rotate = ctx.backend.layer_ops.rotate
        self._widths = [num_heads, num_kv_heads, num_kv_heads]
        self._num_all, self._num_rotated = sum(self._widths), num_heads + num_kv_heads
        self.head_dim = head_dim
        self.index = ctx.add_layer(group, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; cos, sin [T, 1, head_dim] of the tokens' positions."""
        heads = self._qkv(x).view(-1, self._num_all, self.head_dim)
        q, k, v = heads.split(self._widths, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._rotate(self.q_norm(q), cos, sin), self._rotate(self.k_norm(k), cos, sin)
        else:  # side by side in the fused product: one rotation for both
            q, k = self._rotate(heads[:, : self._num_rotated], cos, sin).split(self._widths[:2], dim=1)
        return self._out(plan.forward(self.index, q, k, v).flatten(1))
