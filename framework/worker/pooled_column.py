"""State as wide as the vocabulary, for the few requests that need it: rows of a pool that grows with its users.

A request takes a place when it is admitted and gives it back when it leaves. Place 0 is nobody's and holds the neutral
value for all who have none. The request table makes these columns; stages fill and read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework.sent import sent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import Column, Field


class PooledColumn:
    """`batch.PooledColumn` on one device. slots: the column of the table that holds each row's place.

    least  places that the pool gets when it first grows; it doubles from there
    """

    def __init__(self, declared: Field, slots: Column, dtype: torch.dtype, device: torch.device, least: int) -> None:
        self.field, self._slots, self._least = declared, slots, least
        self.dev = torch.full((1, declared.width), declared.init, dtype=dtype, device=device)
        self._free: list[int] = []
        self._staged: dict[int, NDArray[Any]] = {}

    @property
    def slot(self) -> Tensor:
        return self._slots.dev

    def take(self, req_idx: int) -> NDArray[Any]:
        """A place for the row: neutral host values [width] to fill in, which travel with the admission."""
        place = int(self._slots.np[req_idx]) or self._free_place()
        self._slots.np[req_idx] = place
        self._staged[place] = np.full(self.field.width, self.field.init, self.field.dtype)
        return self._staged[place]

    def release(self, req_idx: int) -> None:
        """Gives the row's place back, if it has one."""
        place = int(self._slots.np[req_idx])
        if place:
            self._slots.np[req_idx] = 0
            self._free.append(place)

    def apply(self) -> None:
        """Sends what `take` handed out to the device."""
        for place, values in self._staged.items():
            self.dev[place] = sent(values, self.dev.device).view(self.dev.dtype)
        self._staged = {}

    def _free_place(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        before = len(self.dev)
        after = max(2 * before, self._least)
        more = self.dev.new_full((after - before, self.field.width), self.field.init)
        self.dev = torch.cat([self.dev, more])
        self._free = list(range(before, after))
