"""Hugging Face folders with safetensors weights: one file or shards named by an index, memory-mapped.

Reads floating-point tensors, and bytes where a model asks for bytes: what they mean is for it to know. Built by name
from `engine.load_format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from framework.errors import CheckpointError
from framework.interfaces import Checkpoint, WeightSource
from framework_loaders.folder import read_folder, read_json
from framework_loaders.source import ShapedSource

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_BYTES = ("U8",)


class SafetensorsLoader:
    """Loader `safetensors`."""

    def __init__(self, options: Any, ctx: None = None) -> None:
        assert not options, f"the safetensors loader has no options, got {options!r}"

    def checkpoint(self, location: Path) -> Checkpoint:
        """The folder's configuration. Raises CheckpointError when it is no folder with a config.json."""
        return read_folder(location, "safetensors")

    def open(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, seed: int) -> WeightSource:
        """The folder's weights. `seed` has no use here: nothing is drawn. Raises CheckpointError for damaged files."""
        return SafetensorsSource(checkpoint.location, dtype, device)


class SafetensorsSource(ShapedSource):
    """Tensors of one or more safetensors files."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._files = {path: _open(path) for path in _paths(folder)}
        self._owner: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in self._owner:
                    raise CheckpointError(
                        f"{path}: tensor '{name}' is also in {self._owner[name].name}. Download again."
                    )
                self._owner[name] = path
                shapes[name] = tuple(file.get_slice(name).get_shape())
        _check_index(folder, self._owner)
        super().__init__(folder, shapes, dtype, device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        path = self._owner[name]
        stored = self._files[path].get_slice(name).get_dtype()
        served = _BYTES if dtype == torch.uint8 else _FLOATS
        if stored not in served:
            raise CheckpointError(
                f"{path}: tensor '{name}' is stored as {stored}; checkpoints quantised like this are not built yet "
                f"(read: {', '.join(served)}). Use another one."
            )
        try:
            tensor = self._files[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor '{name}' cannot be read ({error}). Download it again.") from error
        if self.device.type != "cpu":
            return tensor.to(self.device).to(dtype)  # straight from the mapping, and converted there
        # A view of the mapping would change, or fault, when somebody rewrites the file under a running engine.
        return tensor.to(dtype, copy=True)

    def close(self) -> None:
        self._files.clear()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: this shard is named by {INDEX} and missing. Download it again.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}). Download it again.") from error


def _paths(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return sorted({folder / shard for shard in _weight_map(folder).values()})
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    raise CheckpointError(
        f"{folder}: neither {SINGLE} nor {INDEX} is there (found: {', '.join(others) or 'no *.safetensors'}). "
        "Download the whole checkpoint, or use load_format=dummy for random weights."
    )


def _weight_map(folder: Path) -> Mapping[str, str]:
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(_is_plain_name(shard) for shard in found.values()):
        raise CheckpointError(
            f"{folder / INDEX}: 'weight_map' must map names to files of this folder. Download it again."
        )
    return found


def _is_plain_name(shard: Any) -> bool:
    return isinstance(shard, str) and bool(shard) and Path(shard).name == shard


def _check_index(folder: Path, owner: Mapping[str, Path]) -> None:
    """Every name of an index must be in the shard it names: a stale shard would otherwise serve old weights."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return
    for name, shard in _weight_map(folder).items():
        if name not in owner or owner[name].name != shard:
            raise CheckpointError(
                f"{folder / shard}: tensor '{name}', which {INDEX} puts there, is not. Download it again."
            )
