"""Host arrays on their way to a device. The host does not wait for them, and may write the array afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, in the order of the device's work; on a host device the same memory."""
    return torch.from_numpy(array).to(device, non_blocking=True)
