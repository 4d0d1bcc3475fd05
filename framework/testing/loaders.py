"""The contract suite of loaders: what reading a checkpoint gives, and what is said of one that is missing or damaged.

Each function of `CHECKS` takes a `LoaderCase`, which brings a checkpoint of the loader's format; `crafted` makes one
for loaders of Hugging Face folders. Called by `run=check` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from framework.errors import CheckpointError
from framework.interfaces import Checkpoint, WeightSource
from framework.testing.checking import Skipped, assert_all
from framework.testing.crafted import save_crafted

NO_TENSOR = "no.such.tensor"


@dataclass(frozen=True)
class LoaderCase:
    """The loader is built as target(options, None).

    make    writes a checkpoint of its format into a folder, and returns its location
    tensor  name of a tensor in it, in the names of the Hugging Face layout; shape: its shape
    """

    target: Any
    make: Callable[[Path], Path]
    tensor: str
    shape: tuple[int, ...]
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    def checkpoint(self, folder: str) -> tuple[Any, Checkpoint]:
        loader = self.target(self.options, None)
        return loader, loader.checkpoint(self.make(Path(folder)))


def crafted(target: Any, options: Any) -> LoaderCase:
    """A case of a loader that reads Hugging Face folders."""
    return LoaderCase(target, _save, "model.norm.weight", (32,), options)


def _save(folder: Path) -> Path:
    return save_crafted(folder / "model", torch.eye(20))


def _open(loader: Any, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> WeightSource:
    source: WeightSource = loader.open(checkpoint, dtype=dtype, device=torch.get_default_device(), seed=1)
    return source


def check_header_is_read_without_weights(case: LoaderCase) -> None:
    """`checkpoint` tells architecture, vocabulary and format."""
    with TemporaryDirectory() as folder:
        _, checkpoint = case.checkpoint(folder)
    assert checkpoint.architectures, f"{case.name}: the checkpoint names no architecture"
    size = checkpoint.config.get("vocab_size")
    assert isinstance(size, int) and size > 0, f"{case.name}: config has vocab_size={size!r}"
    assert checkpoint.format, f"{case.name}: the checkpoint does not say its format"


def check_tensor_comes_in_the_dtype_asked_for(case: LoaderCase) -> None:
    """The engine's by default, another one on request; finite, contiguous, of the shape asked for."""
    with TemporaryDirectory() as folder:
        loader, checkpoint = case.checkpoint(folder)
        source = _open(loader, checkpoint, torch.bfloat16)
        assert source.has(case.tensor), f"{case.name}: has('{case.tensor}') is False"
        for dtype in (None, torch.float32):
            tensor = source.take(case.tensor, case.shape, dtype)
            wanted = dtype or torch.bfloat16
            assert (tensor.dtype, tuple(tensor.shape)) == (wanted, case.shape), (
                f"{case.name}: take gives {tensor.dtype} {list(tensor.shape)}, {wanted} {list(case.shape)} is wanted"
            )
            assert bool(tensor.isfinite().all()), f"{case.name}: '{case.tensor}' holds what is no number"
        source.close()


def check_tensor_of_another_shape_is_named(case: LoaderCase) -> None:
    _assert_refused(case, case.tensor, (*case.shape, 3), "of another shape")


def check_tensor_that_is_missing_is_named(case: LoaderCase) -> None:
    _assert_refused(case, NO_TENSOR, case.shape, "that is not there")


def _assert_refused(case: LoaderCase, tensor: str, shape: tuple[int, ...], what: str) -> None:
    with TemporaryDirectory() as folder:
        loader, checkpoint = case.checkpoint(folder)
        source = _open(loader, checkpoint)
        if source.has(NO_TENSOR):
            source.close()
            raise Skipped("it makes up whatever tensor is asked for")
        try:
            source.take(tensor, shape)
        except CheckpointError as error:
            assert tensor in str(error), f"{case.name}: the error of a tensor {what} does not name it: {error}"
            return
        finally:
            source.close()
        raise AssertionError(f"{case.name}: take gives a tensor {what}")


def check_unused_tensors_are_counted(case: LoaderCase) -> None:
    """What nobody took is told, so that a checkpoint of another architecture is noticed."""
    with TemporaryDirectory() as folder:
        loader, checkpoint = case.checkpoint(folder)
        source = _open(loader, checkpoint)
        before = source.unused()
        source.take(case.tensor, case.shape)
        after = source.unused()
        source.close()
    assert case.tensor not in after, f"{case.name}: '{case.tensor}' was taken and counts as unused"
    assert set(after) == set(before) - {case.tensor}, f"{case.name}: taking one tensor changes more than itself"


def check_missing_location_is_told(case: LoaderCase) -> None:
    with TemporaryDirectory() as folder:
        location = Path(folder) / "nothing"
        try:
            case.target(case.options, None).checkpoint(location)
        except CheckpointError as error:
            assert "nothing" in str(error), f"{case.name}: the error of a missing checkpoint does not name it: {error}"
            return
    raise AssertionError(f"{case.name}: reads a checkpoint that is not there")


CHECKS = (
    check_header_is_read_without_weights,
    check_tensor_comes_in_the_dtype_asked_for,
    check_tensor_of_another_shape_is_named,
    check_tensor_that_is_missing_is_named,
    check_unused_tensors_are_counted,
    check_missing_location_is_told,
)


def check_loader(case: LoaderCase) -> None:
    """Runs every check on the case."""
    assert_all(CHECKS, case)
