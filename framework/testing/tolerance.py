"""How near a reference the results of attention plugins and backends must be, in each dtype. Their suites ask."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Absolute and relative, of results of the size of 1: long sums in float32; the others round to 8 or 11 bits, and in
some places in between."""


def off_by(found: Tensor, wanted: Tensor, relative: float) -> float:
    """How far the worst element of `found` is from `wanted`, less `relative` times the latter; NaN is infinitely far.
    Both are of one shape and one dtype that is wide enough."""
    beyond = (found - wanted).abs() - relative * wanted.abs()
    return float(beyond.nan_to_num(nan=torch.inf).max()) if beyond.numel() else 0.0


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str, float32: float) -> None:
    """found is of this dtype, and is wanted, of any dtype, up to TOLERANCE.

    float32  how far it may be off in that: a check knows the size of the terms that are summed
    """
    assert found.dtype == dtype, f"{what} is of {found.dtype}, {dtype} is wanted"
    assert found.shape == wanted.shape, f"{what} gives {list(found.shape)}, not {list(wanted.shape)}"
    relative, most = (0.0, float32) if dtype == torch.float32 else (TOLERANCE[dtype], TOLERANCE[dtype])
    off = off_by(found.cpu().double(), wanted.cpu().double(), relative)
    assert off <= most, f"{what} is off by {off:.3g} in {str(dtype).removeprefix('torch.')}, {most:g} may"
