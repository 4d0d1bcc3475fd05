"""Attention of one whole long prompt by cuDNN, through torch: a tenth faster there than `prompt`.

cuDNN plans every length anew, which takes 50 to 900 ms. So it serves one length alone, in which prompts that are longer
than a step come in again and again: the most tokens of a step. `attention` tries it once at start-up, which also makes
its plan, and asks it for steps that fit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from framework.errors import first_line
from framework.interfaces import AttentionContext, LayerSpec

_log = logging.getLogger("framework")
BACKEND = SDPBackend.CUDNN_ATTENTION
MIN_TOKENS = 2048
"""Fewer are attended in about the same time by either."""


class WholePrompt:
    """Causal attention of num_tokens queries over as many keys, all from position 0, for layers of one shape.

    reason  why it is not used, None when it is
    """

    def __init__(self, ctx: AttentionContext, layers: Sequence[LayerSpec]) -> None:
        self.num_tokens, self._layer = ctx.max_num_batched_tokens, layers[0]
        self._is_plain = all(one.window is None and one.softcap is None and one.sinks is None for one in layers)
        self.reason = self._misfit(ctx) or self._try(ctx)

    def _misfit(self, ctx: AttentionContext) -> str | None:
        if ctx.batch_invariant:
            return "its bits depend on the length of the prompt"
        if not self._is_plain:
            return "it is asked for prompts without a window, a soft cap or sinks"
        if ctx.dtype is torch.float32 or self._layer.head_dim not in (64, 128):
            return "it is asked for prompts in bfloat16 or float16, with heads of 64 or 128"
        if self.num_tokens < MIN_TOKENS:
            return f"steps of {self.num_tokens} tokens are too short for it to gain anything"
        return None

    def _try(self, ctx: AttentionContext) -> str | None:
        """Attends zeros once, with the strides that a step has."""
        layer, device = self._layer, ctx.backend.device
        sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        heads = torch.zeros(self.num_tokens, sum(sizes), layer.head_dim, dtype=ctx.dtype, device=device)
        q, k, v = heads.split(sizes, dim=1)
        try:
            self(q.contiguous(), k.contiguous(), v, layer.scale)
        except RuntimeError as error:
            reason = first_line(error)
            _log.warning("attention=triton: prompts of %d tokens go without cuDNN: %s", self.num_tokens, reason)
            return reason
        return None

    def serves(self, scheduled: NDArray[np.int32], max_lens: NDArray[np.int32], num_tokens: int) -> bool:
        """Whether a step is one request's first num_tokens tokens; max_lens are upper bounds of its length."""
        whole = self.num_tokens
        if self.reason is not None or len(scheduled) != 1:
            return False
        return bool(scheduled[0] == max_lens[0] == num_tokens == whole)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, Hq, D], k, v [T, Hk, D] -> [T, Hq, D]. Raises RuntimeError where cuDNN cannot."""
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        with sdpa_kernel(BACKEND):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
