"""Launch shapes by the width of heads and the dtype: measured on an H200, chosen in Python so that a shape is compiled
once and no step waits for a search. `attention` asks; nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeShape:
    """Of `decode_kernel` and its items. programs_per_sm: programs for which the keys of a step are cut."""

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    min_keys: int = 64
    early: int = 0


@dataclass(frozen=True)
class PromptShape:
    """Of `prompt_kernel`: rows (queries times heads of a KV head) and keys of a tile."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def decode_shape(dtype: torch.dtype, dim_pad: int) -> DecodeShape:
    """A tile of keys and values is 32 KiB, of which two are on the way: three programs fit a multiprocessor."""
    if dtype is torch.float32:
        return DecodeShape(32, 8, 3) if dim_pad <= 128 else DecodeShape(16, 4, 3)
    return DecodeShape(64 if dim_pad <= 128 else 32, 2 if dim_pad <= 128 else 4, 3)


def prompt_shape(dtype: torch.dtype, dim_pad: int) -> PromptShape:
    if dtype is torch.float32:
        return PromptShape(64, 32, 8, 2) if dim_pad <= 128 else PromptShape(16, 16, 4, 2)
    return PromptShape(128, 64, 8, 3) if dim_pad <= 128 else PromptShape(64, 32, 4, 3)
