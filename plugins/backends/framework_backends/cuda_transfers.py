"""A step's result on its way from the device to the host, in as few copies as there can be.

An eager step's result is copied behind it, into memory of its own. A captured step writes its own into an `Outbox`
while it runs: what is handed out then is a place of the outbox, which a later step takes again. The backend calls in.
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
    """How the tensors of a value on one device come to the host.

    Dataclasses, tuples, lists and dicts are looked through. Tensors that stand close to each other in one storage are
    copied together, with what is between them. What holds no tensor of the device is the value's own.
    """

    def __init__(self, value: Any, device: torch.device) -> None:
        tensors = {id(tensor): tensor for tensor in _tensors(value, device)}
        self._pieces, self.num_bytes = _pieces(list(tensors.values()))
        self._is_pinned = device.type == "cuda"
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
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        for source, place in zip(self.sources, self.places, strict=True):
            memory[place : place + len(source)].copy_(source, non_blocking=True)
        return memory

    @property
    def sources(self) -> list[Tensor]:
        """Bytes of the device that are copied."""
        return [piece.source for piece in self._pieces if len(piece.source)]

    @property
    def places(self) -> list[int]:
        """Where each source goes in the host's memory, multiples of 16."""
        return [piece.place for piece in self._pieces if len(piece.source)]

    def value(self, memory: Tensor) -> Any:
        """The value with its tensors in memory [num_bytes] that holds the sources; they may arrive later."""
        flat = {dtype: memory.view(dtype) for dtype in self._dtypes}
        first = {dtype: one.storage_offset() for dtype, one in flat.items()}
        return self._rebuild(
            [flat[dtype].as_strided(shape, strides, first[dtype] + at) for dtype, (shape, strides, at) in self._views]
        )


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
        storage = group[0].untyped_storage()
        end = min(_aligned(max(map(_last_byte, group))), storage.nbytes())
        source = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        source.set_(storage, start, (end - start,), (1,))
        pieces.append(_Piece(tuple(group), source, start, size))
        size += _aligned(end - start)
    return pieces, size


def _neighbours(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one storage with less than `_WORTH_A_COPY` bytes between each and those before it."""
    storages: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for group in storages.values():
        near: list[Tensor] = []
        end = 0
        for tensor in sorted(group, key=_first_byte):
            if near and _first_byte(tensor) - end > _WORTH_A_COPY:
                yield near
                near, end = [], 0
            near.append(tensor)
            end = max(end, _last_byte(tensor))
        yield near


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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


# -------------------------------------------------------------------------------------------------------- the ways


_SLOTS = 4
"""Results of one captured step that have not been read: more than there are steps in flight."""
_LARGEST_OUTBOX = 64 << 10
"""Bytes of a result that a step writes itself. Of larger ones the time counts that a copy takes, not its beginning."""


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


class Slot:
    """A place of an outbox: all that a step needs of it is made once.

    memory  [bytes] uint8, pinned
    value   what a step leaves there, once it has come that far
    """

    __slots__ = ("_event", "memory", "value")

    def __init__(self, copies: HostCopies, memory: Tensor) -> None:
        self.memory, self.value = memory, copies.value(memory)
        self._event: Any = None

    def expect(self, stream: torch.cuda.Stream) -> None:
        """The value is there when the stream has come this far."""
        if self._event is None:
            self._event = super(torch.cuda.Event, torch.cuda.Event())  # its methods without those of Python around them
        self._event.record(stream)

    def done(self) -> bool:
        assert self._event is not None, "no step was told to write here"
        return bool(self._event.query())

    def wait(self) -> Any:
        """The value, once it is there: to be read before the step that takes the slot next is given to the device."""
        assert self._event is not None, "no step was told to write here"
        self._event.synchronize()
        return self.value


class Outbox:
    """Pinned memory that a captured step writes its result into. value: that of a step which was run for a trial."""

    def __init__(self, value: Any, device: torch.device) -> None:
        from framework_backends.triton.outbox import write_outbox

        self._device, self._write = device, write_outbox
        self.copies = HostCopies(value, device)
        self._ring = torch.zeros(_SLOTS, self.copies.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._slots: list[Slot] = []
        self._num_taken = 0
        self.write(value)  # for the compiler
        self._turn.zero_()

    def write(self, value: Any) -> None:
        """Part of the step that is captured: its value goes into the next slot."""
        self.copies = HostCopies(value, self._device)
        assert self.copies.num_bytes == self._ring.shape[1], "the captured step gives something else than the trial"
        self._slots = [Slot(self.copies, memory) for memory in self._ring]
        self._write(self.copies.sources, self.copies.places, self._ring, self._turn)

    def next(self) -> Slot:
        """The slot of a replay: has to be asked for with each of them."""
        slot = self._slots[self._num_taken % _SLOTS]
        self._num_taken += 1
        return slot

    def begin_anew(self) -> None:
        """The next replay takes the first slot, however many there were. What steps in flight leave is not read."""
        with torch.inference_mode():  # in which it may have been made, and a step that goes on is not
            self._turn.zero_()
        self._num_taken = 0


class Transfers:
    """Results on their way from one device. Copies run in the stream of the steps, so that nothing overtakes them: on
    another one they would cost the host 50 us more, and the device as much, for the next step has to wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}

    def outbox(self, value: Any) -> Outbox | None:
        """For a step with such a value; None for a large one, which is copied behind the step."""
        num_bytes = HostCopies(value, self._device).num_bytes
        return Outbox(value, self._device) if 0 < num_bytes <= _LARGEST_OUTBOX else None

    def copied(self, value: Any) -> Arriving:
        """The value of a step that the current stream has been given."""
        return self.started(self.copies(value))

    def copies(self, value: Any) -> HostCopies:
        return HostCopies(value, self._device)

    def started(self, copies: HostCopies) -> Arriving:
        """As `copied` for tensors that stay where they are: to find out how to copy them costs more than to do it."""
        memory, event = copies.start(), torch.cuda.Event()
        event.record(self._stream())
        return Arriving(copies, memory, event)

    def written(self, slot: Slot) -> Slot:
        """The value of a replay that the current stream has been given, in the slot of its outbox."""
        slot.expect(self._stream())
        return slot

    def _stream(self) -> torch.cuda.Stream:
        """The current one."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._streams.get(raw)
        if stream is None:  # to make a stream's object costs more than all else here
            stream = self._streams[raw] = torch.cuda.current_stream(self._device)
        return stream
