"""The header of a GGUF file: metadata and the table of tensors, walked with one cursor over a memory map.

No tensor is decoded here, and no key is interpreted. Source of the format: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from framework.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# type number -> (struct code, numpy dtype); the file is little-endian.
_SCALARS = {
    0: ("<B", "u1"), 1: ("<b", "i1"), 2: ("<H", "<u2"), 3: ("<h", "<i2"), 4: ("<I", "<u4"), 5: ("<i", "<i4"),
    6: ("<f", "<f4"), 7: ("<?", "?"), 10: ("<Q", "<u8"), 11: ("<q", "<i8"), 12: ("<d", "<f8"),
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor table. shape is outermost first (stored innermost first); offset is absolute."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    size: int


def read_header(path: Path) -> GgufHeader:
    """Metadata and tensor table. Number arrays come as lists, strings decoded.

    Raises CheckpointError naming the file when it is missing, no GGUF file, of another version, or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not readable as a GGUF file ({error}). Download it again.") from error


class _Cursor:
    """A position in the file that only moves forward."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged GGUF header, {what} at byte {self.at}. Download it again.")

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file, it starts with {self.data[:4]!r}. Name a .gguf file.")
        self.at = 4
        try:
            return self._header()
        except struct.error:
            raise self.damaged("the file ends too early") from None
        except UnicodeDecodeError as error:
            raise self.damaged(f"text that is not UTF-8 ({error.reason})") from None

    def _header(self) -> GgufHeader:
        version = self.scalar("<I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not read, versions 2 and 3 (little-endian) are. "
                "Convert it again."
            )
        num_tensors, num_fields = self.scalar("<Q"), self.scalar("<Q")
        fields = self._table(num_fields, "key", self._field)
        tensors = self._table(num_tensors, "tensor", self._tensor)
        alignment = self._alignment(fields.get("general.alignment", DEFAULT_ALIGNMENT))
        for t in tensors.values():
            if t.offset % alignment:
                raise self.damaged(f"tensor '{t.name}' begins at {t.offset}, no multiple of {alignment},")
        start = -(-self.at // alignment) * alignment
        placed = {t.name: TensorEntry(t.name, t.shape, t.kind, start + t.offset) for t in tensors.values()}
        return GgufHeader(self.path, fields, placed, len(self.data))

    def _table(self, count: int, what: str, read: Callable[[], tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for _ in range(count):
            name, value = read()
            if name in table:
                raise self.damaged(f"{what} '{name}' stands there twice")
            table[name] = value
        return table

    def _field(self) -> tuple[str, Any]:
        name = self.string()
        return name, self._value(self.scalar("<I"), name)

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(name)
        if kind not in _SCALARS:
            raise self.damaged(f"key '{name}' has the unknown type {kind}")
        return self.scalar(_SCALARS[kind][0])

    def _array(self, name: str) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise self.damaged(f"array '{name}' has elements of the type {kind}, which is not read")
        dtype = np.dtype(_SCALARS[kind][1])
        end = self.at + count * dtype.itemsize
        if end > len(self.data):
            raise self.damaged(f"array '{name}' of {count} numbers is longer than the file")
        values = np.frombuffer(self.data[self.at : end], dtype).tolist()
        self.at = end
        return values

    def _strings(self, count: int) -> list[str]:
        """The long arrays of a vocabulary: locals only, one bounds check at the end (a short slice fails the next)."""
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            (length,) = unpack(data, at)
            end = at + 8 + length
            out.append(data[at + 8 : end].decode())
            at = end
        self.at = at
        if at > len(data):
            raise struct.error("past the end")
        return out

    def _tensor(self) -> tuple[str, TensorEntry]:
        name, rank = self.string(), self.scalar("<I")
        if rank > 4:
            raise self.damaged(f"tensor '{name}' has {rank} dimensions, at most 4 are possible")
        shape = tuple(reversed([self.scalar("<Q") for _ in range(rank)]))
        return name, TensorEntry(name, shape, self.scalar("<I"), self.scalar("<Q"))

    def _alignment(self, alignment: Any) -> int:
        """The format asks for a multiple of 8."""
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self.damaged(f"general.alignment={alignment!r} is no alignment")
        return alignment

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        end = self.at + length
        if end > len(self.data):
            raise struct.error("past the end")
        text = self.data[self.at : end].decode()
        self.at = end
        return text
