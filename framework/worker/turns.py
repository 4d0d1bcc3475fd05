"""Host memory that steps are told from, in turns: what a step in flight may still read is not written.

A copy to the device does not wait for the device when it reads such memory. Called by the step's input buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.interfaces import Backend


@dataclass(frozen=True, slots=True)
class Turn:
    """One piece of int64 host memory, as tensor [lines * width] and as array [lines, width]."""

    tensor: Tensor
    array: NDArray[Any]


class Turns:
    """Pieces for max_in_flight steps and the one that is made meanwhile."""

    def __init__(self, backend: Backend, lines: int, width: int, max_in_flight: int) -> None:
        tensors = [backend.host_memory(lines * width) for _ in range(max_in_flight + 1)]
        self._turns = [Turn(tensor, tensor.numpy().reshape(lines, width)) for tensor in tensors]
        self._last = 0

    def next(self) -> Turn:
        """The piece that was used longest ago: its step has come back."""
        self._last = (self._last + 1) % len(self._turns)
        return self._turns[self._last]
