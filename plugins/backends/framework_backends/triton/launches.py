"""Programmatic dependent launch: a kernel may begin while the one before it ends, and reads what does not depend on it.

A kernel calls `let_next_begin` first, then loads weights, then `wait_for_previous`, and only behind that touches what
another kernel writes, or writes itself. Where every kernel keeps to this order nothing is seen half-written: a grid
that has waited has all grids before it behind itself. Both are empty where DEPENDENT is false (the interpreter).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_ROWS = 64
"""A graph is given to the device in 4 us, and takes the host about 1 us more for each such launch in it: what they save
the device counts where a step is short."""


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """Lets the next grid begin once all programs of this one have come here or ended."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Goes on once the grids before this one have ended and what they wrote can be read."""
    if DEPENDENT:
        gdc_wait()


def launches_dependent() -> bool:
    """Whether the current device has such launches (compute capability 9.0 and up)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def pays(dependent: bool, num_rows: int) -> bool:
    """Whether a launch for so many rows may be dependent, where the device has such launches."""
    return dependent and num_rows <= MOST_ROWS


def launch_words(dependent: bool) -> dict[str, bool]:
    """Words of a launch: the constant of kernels, and that of the driver (which the interpreter does not know)."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where matrix products of 16 bits are wrong without a word."""
    return bool(triton.knobs.runtime.interpret)
