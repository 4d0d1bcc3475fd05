"""Bits of tokens, packed in words, as bounds of their logits: what masks that keep one bit a token apply.

Bit id % 32 of word id // 32 says whether a token is allowed. Called by the stages `allowed_ids` and `grammar`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BitBounds:
    """A table of the 256 octets of a mask; looking octets up costs a CPU a tenth of a boolean mask."""

    def __init__(self, device: torch.device) -> None:
        values, places = torch.arange(256, device=device), torch.arange(8, device=device)
        self._octets = torch.where((values.unsqueeze(1) >> places) & 1 == 1, torch.inf, -torch.inf)

    def clamp(self, logits: Tensor, words: Tensor) -> None:
        """-inf in place for every token of logits [n, V] whose bit is not set in words [n, ceil(V / 32)] int32.

        The lesser of a logit and +inf is the logit, bit for bit: that is what a set bit gives.
        """
        octets = words.contiguous().view(torch.uint8).flatten().int()
        logits.clamp_max_(self._octets.index_select(0, octets).view(len(words), -1)[:, : logits.shape[1]])
