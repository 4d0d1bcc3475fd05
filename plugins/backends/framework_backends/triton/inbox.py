"""A captured step's first launch: it reads what the host has told from host memory itself, each time the next line.

A copy in front of a graph is a call of its own for the host, and keeps the device idle until the graph begins. Called
by `cuda_step_ops`; the runner's input buffers write the lines.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 256, 8
"""Rows at a time. One program reads it all: 256 rows and their blocks are 4 kB."""


@triton.jit(do_not_specialize=["num_rows"])
def inbox_kernel(
    told, ring, turn, num_rows, width, num_lines, LINES: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (1). told [lines, width] takes rows of piece `turn` of ring [PIECES, lines, width], int64; turn moves on.

    LINES  a power of two that the lines fit in
    """
    number = tl.load(turn)
    line = tl.arange(0, LINES)[:, None]
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)[None, :]
        is_in = (line < num_lines) & (row < num_rows)
        at = line * width + row
        # The host writes the piece anew, and no cache of the device hears of it: .cv reads past them, and as `volatile`
        # does not, many words in one go.
        words = tl.load(ring + number * num_lines * width + at, mask=is_in, cache_modifier=".cv")
        tl.store(told + at, words, mask=is_in)
    tl.debug_barrier()
    tl.store(turn, (number + 1) % PIECES)


def receive(told: Tensor, ring: Tensor, turn: Tensor, num_rows: int) -> None:
    """As `step_ops.receive`; ring is pinned. Nothing waits."""
    pieces, lines, width = ring.shape
    inbox_kernel[(1,)](
        told, ring, turn, num_rows, width, lines, LINES=triton.next_power_of_2(lines), PIECES=pieces, BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
