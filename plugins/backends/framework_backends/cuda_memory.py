"""Memory of a CUDA device: how much KV blocks may have, and whole blocks copied, brought to the host and put back.

The backend calls in. Only moving blocks to the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.interfaces import KVSpec

DEFAULT_FRACTION = 0.9
"""Of the device's memory that may be in use in all. The rest is for captured graphs, which are recorded when the KV
memory is there, for libraries' workspaces, and for the gaps between allocations."""


class Meter:
    """What a trial step takes beside what is there before it: the largest step that the engine will make is measured
    once, before KV memory is given away."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Bytes that were allocated at a time since `begin`, beyond those that were allocated then."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """(bytes that are in use by whomever, bytes of the device), what this process has freed not counted."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def kv_bytes(
    max_model_len: int, bytes_per_token: int, fraction: float | None, in_use: int, total: int, step_bytes: int
) -> int:
    """Bytes for KV blocks: `fraction` of all, less what is in use and what a step takes beside it.

    fraction    None for `DEFAULT_FRACTION`
    step_bytes  of the largest step, as a `Meter` says
    Raises ConfigError for a fraction outside (0, 1], and where not even one request of max_model_len has room.
    """
    if fraction is None:
        fraction = DEFAULT_FRACTION
    elif not 0 < fraction <= 1:
        raise ConfigError(
            f"kv_cache.memory_fraction={fraction} must be above 0 and at most 1. Leave it null for {DEFAULT_FRACTION}."
        )
    available = int(fraction * total) - in_use - step_bytes
    wanted = max_model_len * bytes_per_token
    if available < wanted:
        raise ConfigError(
            f"engine.max_model_len={max_model_len} takes {_gb(wanted)} of KV cache for one request, and "
            f"{_gb(max(available, 0))} are left: kv_cache.memory_fraction={fraction:g} of {_gb(total)}, less "
            f"{_gb(in_use)} in use and {_gb(step_bytes)} for a step. Lower engine.max_model_len, "
            "raise kv_cache.memory_fraction, or free memory of the device"
        )
    return available


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def allocate_kv(specs: Sequence[KVSpec], num_blocks: int, device: torch.device) -> list[Tensor]:
    """One zeroed tensor a layer. Raises torch.OutOfMemoryError, which is a RuntimeError."""
    shapes = [[num_blocks if size == -1 else size for size in spec.shape] for spec in specs]
    return [torch.zeros(shape, dtype=spec.dtype, device=device) for shape, spec in zip(shapes, specs, strict=True)]


def copy_blocks(kv: Sequence[Tensor], specs: Sequence[KVSpec], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks [(source, destination)] of every layer. All sources are read before any destination is written."""
    if not pairs:
        return
    sources, targets = sent(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), kv[0].device)
    for tensor, dim in zip(kv, _dims(specs), strict=True):
        tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))


def gather_blocks(kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int]) -> list[Tensor]:
    """Host copies [n, ...] a layer of whole blocks, in the order asked. Waits for the device, once for all layers."""
    index = sent(torch.tensor(blocks, dtype=torch.int64), kv[0].device)
    gathered = []
    for tensor, dim in zip(kv, _dims(specs), strict=True):
        picked = tensor.index_select(dim, index).movedim(dim, 0).contiguous()
        gathered.append(_host_like(picked).copy_(picked, non_blocking=True))
    if index.is_cuda:
        torch.cuda.current_stream(index.device).synchronize()
    return gathered


def scatter_blocks(
    kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int], data: Sequence[Tensor]
) -> None:
    """Writes host blocks [n, ...] a layer to their places; the data may be overwritten afterwards."""
    index = sent(torch.tensor(blocks, dtype=torch.int64), kv[0].device)
    for tensor, dim, values in zip(kv, _dims(specs), data, strict=True):
        tensor.index_copy_(dim, index, sent(values, tensor.device).movedim(0, dim))


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy of host values on the device, without waiting: through pinned memory, which the copy reads on its own."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _host_like(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)


def _dims(specs: Sequence[KVSpec]) -> list[int]:
    """The axis of each layer's memory along which its blocks stand."""
    return [spec.shape.index(-1) for spec in specs]
