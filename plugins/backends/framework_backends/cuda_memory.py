"""Memory of a CUDA device: how much KV blocks may have, and the tensors that hold them. The backend calls in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from framework.errors import ConfigError, first_line
from framework.interfaces import KVSpec
from framework_backends.cuda_device import WHOLE_DEVICE

DEFAULT_FRACTION = 0.9
"""Of the device's memory that may be in use in all. The rest is for captured graphs, which are recorded when the KV
memory is there, for libraries' workspaces, and for the gaps between allocations."""


class CudaMemory:
    """The memory of one device, for a backend."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step_bytes = 0

    def profile(self, forward: Callable[[], Any]) -> None:
        """Runs the largest step and remembers what it takes beside what is there before it.

        Raises ConfigError when the device has not so much.
        """
        gc.collect()  # an engine that was closed is a circle of its parts: what goes meanwhile would hide what is taken
        with WHOLE_DEVICE:
            self._step_bytes = self._bytes_of(forward)

    def _bytes_of(self, forward: Callable[[], Any]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        try:
            forward()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the largest step does not fit beside {_gb(before)} of weights ({first_line(error)}). Lower "
                "scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or free memory of the device"
            ) from error
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def kv_bytes(self, max_model_len: int, bytes_per_token: int, fraction: float | None) -> int:
        """As `kv_bytes` for the device as it is now; what this process has freed counts as free."""
        gc.collect()  # as above
        with WHOLE_DEVICE:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return kv_bytes(max_model_len, bytes_per_token, fraction, total - free, total, self._step_bytes)

    def allocate_kv(self, specs: Sequence[KVSpec], num_blocks: int) -> list[Tensor]:
        """One zeroed tensor a layer. Raises torch.OutOfMemoryError, which is a RuntimeError."""
        shapes = [[num_blocks if size == -1 else size for size in spec.shape] for spec in specs]
        pairs = zip(shapes, specs, strict=True)
        return [torch.zeros(shape, dtype=spec.dtype, device=self._device) for shape, spec in pairs]


def kv_bytes(
    max_model_len: int, bytes_per_token: int, fraction: float | None, in_use: int, total: int, step_bytes: int
) -> int:
    """Bytes for KV blocks: `fraction` of all, less what is in use and what a step takes beside it.

    fraction    None for `DEFAULT_FRACTION`
    step_bytes  of the largest step
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
