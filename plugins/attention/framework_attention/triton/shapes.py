"""Launch shapes by the width of heads and the dtype: measured on an H200, chosen in Python so that a shape is compiled
once and no step waits for a search. Where a program of a device has too little memory for a shape, it gets a smaller
one. `attention` asks; nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from framework.errors import ConfigError

Shape = TypeVar("Shape")

_LARGE, _LARGEST = 140_000, 230_912
"""Bytes that tiles of 64 and of 128 keys take in the largest shapes below, about and exactly."""
_LONG_KEYS = 4096
_BESIDE = 2048
"""Bytes of a program beside queries, weights, keys and values, at most."""


@dataclass(frozen=True)
class DecodeShape:
    """Of `decode_kernel`, and how `items_kernel` cuts its work.

    programs_per_sm  for so many programs a multiprocessor the keys of a step are cut: what fits one at a time
    good_keys        but no program gets fewer, as long as each multiprocessor has a program
    min_keys         and never fewer than these
    few_per_sm       instead of programs_per_sm for fewer rows and KV heads than multiprocessors with at most short_keys
                     each: programs that a captured step launches for nothing cost 2 of 26 us there
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 4
    good_keys: int = 512
    min_keys: int = 64
    few_per_sm: int = 2
    short_keys: int = 16384


@dataclass(frozen=True)
class PromptShape:
    """Of `prompt_kernel`: rows (queries times heads of a KV head) and keys of a tile."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def first_with_room(what: str, shapes: Iterable[Shape], num_bytes: Callable[[Shape], int], shared_bytes: int) -> Shape:
    """The first of the shapes that takes no more than the shared_bytes that a program may have on its multiprocessor.

    Raises ConfigError, which begins with `what`, where none does.
    """
    needed = []
    for shape in shapes:
        needed.append(num_bytes(shape))
        if needed[-1] <= shared_bytes:
            return shape
    raise ConfigError(
        f"{what} needs {min(needed):,} bytes of shared memory for a program, and this device has {shared_bytes:,}. "
        "Use another device, or another attention"
    )


def decode_shape(dtype: torch.dtype, dim_pad: int, group: int, shared_bytes: int) -> DecodeShape:
    """group: heads of a KV head. shared_bytes: memory that a program may have on its multiprocessor.

    With heads of 128 in a short dtype a tile of keys and values is 16 KiB and two are on the way: five programs fit a
    multiprocessor. Raises ConfigError where no tile has room.
    """

    def num_bytes(shape: DecodeShape) -> int:
        rows, tiles = max(16, group), shape.num_stages - 1
        return dtype.itemsize * (2 * tiles * shape.tile * dim_pad + rows * (dim_pad + shape.tile)) + _BESIDE

    if dtype is torch.float32:
        shape = DecodeShape(32, 8, 3) if dim_pad <= 128 else DecodeShape(16, 4, 3)
    else:
        shape = DecodeShape(32, 2 if dim_pad <= 128 else 4, 3)
    smaller = (replace(shape, num_stages=2), replace(shape, num_stages=2, tile=16))
    return first_with_room(f"attention=triton: a head of {dim_pad} values", (shape, *smaller), num_bytes, shared_bytes)


def prompt_shape(dtype: torch.dtype, dim_pad: int, group: int, shared_bytes: int, num_keys: int = 0) -> PromptShape:
    """group, shared_bytes: as in `decode_shape`. num_keys: of the longest prompt, about.

    The number of rows does not depend on num_keys. With tiles of 128 keys one prompt of 8192 takes 7 % less, and eight
    of 1024 take 28 % more. Raises ConfigError where no tile has room.
    """

    def num_bytes(shape: PromptShape) -> int:
        return dtype.itemsize * (2 * shape.num_stages * shape.tile + max(shape.rows, group)) * dim_pad + _BESIDE

    shape = _measured_prompt_shape(dtype, dim_pad, shared_bytes, num_keys)
    smaller = (replace(shape, num_stages=2), replace(shape, rows=16, tile=16, num_stages=2, num_warps=4))
    return first_with_room(f"attention=triton: a head of {dim_pad} values", (shape, *smaller), num_bytes, shared_bytes)


def _measured_prompt_shape(dtype: torch.dtype, dim_pad: int, shared_bytes: int, num_keys: int) -> PromptShape:
    if dtype is torch.float32:
        return PromptShape(64, 32, 8, 2) if dim_pad <= 128 else PromptShape(16, 16, 4, 2)
    if shared_bytes < _LARGE:
        return PromptShape(64, 64, 4, 2) if dim_pad <= 128 else PromptShape(32, 32, 4, 2)
    if dim_pad > 128:
        return PromptShape(64, 32, 4, 3)
    is_long = num_keys >= _LONG_KEYS and shared_bytes >= _LARGEST
    return PromptShape(128, 128 if is_long else 64, 8, 3)


def invariant_shape(dtype: torch.dtype, dim_pad: int, group: int, shared_bytes: int) -> PromptShape:
    """One for prompts and decodes alike: smaller than a prompt's alone, since a decode fills few of the rows."""
    if dtype is torch.float32 or dim_pad > 128 or shared_bytes < _LARGE:
        return prompt_shape(dtype, dim_pad, group, shared_bytes)
    return PromptShape(64, 64, 4, 3)
