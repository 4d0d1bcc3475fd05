"""Host memory that preempted requests are swapped out to: whole blocks of every layer, by number.

The scheduler's `SwapSpace` decides which host block holds what; the runner calls in with the pairs of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from framework.interfaces import Backend, KVSpec

Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """`num_blocks` host blocks for the KV memory of one engine, allocated when the first one is written."""

    def __init__(self, backend: Backend, kv: Sequence[torch.Tensor], specs: Sequence[KVSpec], num_blocks: int) -> None:
        self._backend, self._kv, self._specs, self._num_blocks = backend, kv, specs, num_blocks
        self._layers: list[torch.Tensor] = []

    def swap_out(self, pairs: Pairs) -> None:
        """Copies blocks [(block, host block)] to the host."""
        gathered = self._backend.gather_blocks(self._kv, self._specs, [block for block, _ in pairs])
        if not self._layers:
            self._layers = [torch.empty((self._num_blocks, *g.shape[1:]), dtype=g.dtype) for g in gathered]
        index = torch.tensor([host for _, host in pairs])
        for layer, blocks in zip(self._layers, gathered, strict=True):
            layer.index_copy_(0, index, blocks)

    def swap_in(self, pairs: Pairs) -> None:
        """Copies host blocks [(host block, block)] back."""
        index = torch.tensor([host for host, _ in pairs])
        layers = [layer.index_select(0, index) for layer in self._layers]
        self._backend.scatter_blocks(self._kv, self._specs, [block for _, block in pairs], layers)
