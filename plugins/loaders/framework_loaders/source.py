"""What every weight source of this package shares: names, shape checks, dtype, device, and who has been taken.

A format brings a `_read` and its table of shapes; which names exist and what they mean is its own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from framework.errors import CheckpointError, did_you_mean


class ShapedSource:
    """A WeightSource over a table of shapes. Subclasses read one tensor and release what they opened.

    shapes  name -> shape, of every tensor the file holds (names of the Hugging Face layout)
    """

    def __init__(
        self, where: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.where, self.dtype, self.device = where, dtype, device
        self._shapes = shapes
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in memory of its own, in `dtype` (default: the source's), on the source's device.

        Raises CheckpointError when it is missing, damaged or not of `shape`.
        """
        self._check(name, tuple(shape))
        self._taken.add(name)
        return self._read(name, dtype or self.dtype).to(self.device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._shapes.get(name)
        if found is None:
            hint = did_you_mean(name, self._shapes)
            raise CheckpointError(
                f"{self.where}: tensor '{name}' {list(shape)} is missing.{hint} "
                "Download or convert the checkpoint again."
            )
        if tuple(found) != shape:
            raise CheckpointError(
                f"{self.where}: tensor '{name}' has shape {list(found)}, but the config asks for {list(shape)}. "
                "Use the config and the weights of one checkpoint."
            )

    def unused(self) -> list[str]:
        """Names that nobody took, sorted."""
        return sorted(set(self._shapes) - self._taken)

    def close(self) -> None:
        """Releases files; tensors that were taken stay valid."""

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError  # every format reads in its own way
