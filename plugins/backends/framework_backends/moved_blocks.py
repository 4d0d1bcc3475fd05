"""Whole KV blocks copied, brought to the host and put back, whatever the layout of a layer's memory and its device.

Backends take this part of their contract from here. Only bringing blocks to the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from framework.interfaces import KVSpec


class MovesBlocks:
    """The part of `interfaces.Backend` that moves blocks."""

    device: torch.device

    def copy_blocks(self, kv: Sequence[Tensor], specs: Sequence[KVSpec], pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks [(source, destination)] of every layer. All sources are read before any destination is
        written."""
        sources, targets = self._sent(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous())
        for tensor, dim in _layers(kv, specs):
            tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))

    def gather_blocks(self, kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int]) -> list[Tensor]:
        """Host copies [n, ...] a layer of whole blocks, in the order asked. Waits for the device, once for all."""
        index = self._sent(torch.tensor(blocks, dtype=torch.int64))
        picked = [tensor.index_select(dim, index).movedim(dim, 0).contiguous() for tensor, dim in _layers(kv, specs)]
        if self.device.type == "cpu":
            return picked
        memory = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in picked]
        gathered = [host.copy_(one, non_blocking=True) for host, one in zip(memory, picked, strict=True)]
        torch.cuda.current_stream(self.device).synchronize()
        return gathered

    def scatter_blocks(
        self, kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int], data: Sequence[Tensor]
    ) -> None:
        """Writes host blocks [n, ...] a layer to their places; the data may be overwritten afterwards."""
        index = self._sent(torch.tensor(blocks, dtype=torch.int64))
        for (tensor, dim), values in zip(_layers(kv, specs), data, strict=True):
            tensor.index_copy_(dim, index, self._sent(values).movedim(0, dim))

    def _sent(self, values: Tensor) -> Tensor:
        """Host values on the device, without waiting: through pinned memory of their own, which the device reads later.
        `Tensor.pin_memory` would give back values that are pinned already, and the caller may overwrite those."""
        if self.device.type == "cpu":
            return values
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return pinned.copy_(values).to(self.device, non_blocking=True)


def _layers(kv: Sequence[Tensor], specs: Sequence[KVSpec]) -> Iterator[tuple[Tensor, int]]:
    """Each layer's memory with the axis along which its blocks stand."""
    for tensor, spec in zip(kv, specs, strict=True):
        yield tensor, spec.shape.index(-1)
