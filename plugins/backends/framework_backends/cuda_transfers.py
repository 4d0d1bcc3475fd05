"""A step's result on its way from the device to the host: on a stream of its own, in as few copies as there can be.

The backend makes the `HostCopies` of a value, once where its tensors stay where they are, and starts them after each
step. What is handed out is memory of its own: it may be kept for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: pieces start at multiples of it, so that every dtype can be viewed in them."""
_WORTH_A_COPY = 64 << 10
"""Bytes between two tensors that are copied with them: at 50 GB/s they take less than the call of another copy."""


class HostCopies:
    """How the tensors of a value on one device come to the host, for as long as they stay where they are.

    Dataclasses, tuples, lists and dicts are looked through. Tensors that stand close to each other in one storage are
    copied together, with what is between them. What holds no tensor of the device is the value's own.
    """

    def __init__(self, value: Any, device: torch.device) -> None:
        tensors = {id(tensor): tensor for tensor in _tensors(value, device)}
        self._pieces, size = _pieces(list(tensors.values()))
        self._num_bytes, self._is_pinned = size, device.type == "cuda"
        # A view is told by where it lies in the memory of all pieces, in entries of its dtype.
        self._views = [
            (tensor.dtype, (tensor.shape, tensor.stride(), piece.at(tensor) // tensor.itemsize))
            for piece in self._pieces
            for tensor in piece.tensors
        ]
        self._dtypes = {view[0] for view in self._views}
        places = {id(tensor): place for place, tensor in enumerate(t for p in self._pieces for t in p.tensors)}
        self._rebuild = _rebuilding(value, {key: places[key] for key in tensors}) or (lambda _: value)

    def start(self) -> Tensor:
        """Host memory with the tensors' bytes in it, once the current stream has come this far."""
        memory = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        for piece in self._pieces:
            memory[piece.place : piece.place + len(piece.source)].copy_(piece.source, non_blocking=True)
        return memory

    def value(self, memory: Tensor) -> Any:
        """The value with its tensors in memory that `start` gave; it may be asked for before they are there."""
        flat = {dtype: memory.view(dtype) for dtype in self._dtypes}
        return self._rebuild([flat[dtype].as_strided(*where) for dtype, where in self._views])


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tensors that are copied together. source [bytes] uint8 covers them, from byte `start` of their storage; it goes
    to byte `place` of the host's memory."""

    tensors: tuple[Tensor, ...]
    source: Tensor
    start: int
    place: int

    def at(self, tensor: Tensor) -> int:
        """Byte of the host's memory at which the tensor begins."""
        return self.place + _first_byte(tensor) - self.start


def _pieces(tensors: list[Tensor]) -> tuple[list[_Piece], int]:
    """The pieces, and the bytes that they take on the host together."""
    pieces: list[_Piece] = []
    size = 0
    for group in _neighbours(tensors):
        start = _first_byte(group[0]) // _ALIGNMENT * _ALIGNMENT
        end = max(map(_last_byte, group))
        source = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        source.set_(group[0].untyped_storage(), start, (end - start,), (1,))
        pieces.append(_Piece(tuple(group), source, start, size))
        size += -(-(end - start) // _ALIGNMENT) * _ALIGNMENT
    return pieces, size


def _neighbours(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one storage with less than `_WORTH_A_COPY` bytes between each and those before it."""
    group: list[Tensor] = []
    end = 0
    for tensor in sorted(tensors, key=lambda t: (t.untyped_storage().data_ptr(), _first_byte(t))):
        is_near = group and _first_byte(tensor) - end <= _WORTH_A_COPY
        if group and not (is_near and tensor.untyped_storage().data_ptr() == group[0].untyped_storage().data_ptr()):
            yield group
            group, end = [], 0
        group.append(tensor)
        end = max(end, _last_byte(tensor))
    if group:
        yield group


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _last_byte(tensor: Tensor) -> int:
    """The byte behind the last one that the tensor reads in its storage."""
    if not tensor.numel():
        return _first_byte(tensor)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _first_byte(tensor) + (last + 1) * tensor.itemsize


# -------------------------------------------------------------------------------------------------------- the tree

_Rebuild = Callable[[list[Tensor]], Any]


def _tensors(value: Any, device: torch.device) -> Iterator[Tensor]:
    """The tensors of `value` on the device."""
    if isinstance(value, Tensor):
        if value.device.type == device.type:
            yield value
        return
    for child in _children(value):
        yield from _tensors(child, device)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _rebuilding(value: Any, places: dict[int, int]) -> _Rebuild | None:
    """A function that makes `value` of the host's views; places: {id of a tensor: its view}. None where it has none."""
    if isinstance(value, Tensor):
        place = places.get(id(value))
        return None if place is None else lambda views: views[place]
    children = _children(value)
    made = [_rebuilding(child, places) for child in children]
    if not any(made):
        return None
    of_children = [one or _constant(child) for one, child in zip(made, children, strict=True)]
    assemble = _assembling(value)
    return lambda views: assemble([one(views) for one in of_children])


def _constant(value: Any) -> _Rebuild:
    return lambda _: value


def _assembling(value: Any) -> Callable[[list[Any]], Any]:
    """A function from other children to a container like `value`."""
    if isinstance(value, dict):
        keys = list(value)
        return lambda children: dict(zip(keys, children, strict=True))
    if isinstance(value, list):
        return list
    if isinstance(value, tuple):
        return type(value)._make if hasattr(value, "_make") else tuple
    names = [field.name for field in fields(value)]
    return lambda children: _with_fields(type(value), names, children)


def _with_fields(cls: type, names: list[str], values: list[Any]) -> Any:
    """A dataclass, frozen or with slots as it may be; what its `__init__` works out is among the fields already."""
    made: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


# ------------------------------------------------------------------------------------------------------ the stream


class Arriving:
    """A value that is on its way to the host. Holds the device's memory until it has been read."""

    __slots__ = ("_copies", "_event", "_memory")

    def __init__(self, copies: HostCopies, memory: Tensor, event: torch.cuda.Event) -> None:
        self._copies, self._memory, self._event = copies, memory, event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> Any:
        """The value, once it is there."""
        value = self._copies.value(self._memory)
        self._event.synchronize()
        return value


class TransferStream:
    """The stream on which results leave the device while the next step computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._computed = torch.cuda.Event()
        self._last: torch.cuda.Event | None = None

    def copies(self, value: Any) -> HostCopies:
        return HostCopies(value, self._device)

    def start(self, copies: HostCopies) -> Arriving:
        """Copies after all that the current stream has been given so far."""
        self._computed.record()
        with torch.cuda.stream(self._stream):
            self._computed.wait()
            memory = copies.start()
            event = torch.cuda.Event()
            event.record()
        self._last = event
        return Arriving(copies, memory, event)

    def before_overwrite(self) -> None:
        """What the current stream is given from now on begins when all that was started has been read."""
        if self._last is not None:
            self._last.wait()
            self._last = None
