"""A captured step's last launch: it writes the result into host memory itself, each time into the next slot of a ring.

A copy behind a graph keeps the device idle for 9 us, on a stream of its own as well once the next step has to wait for
it; this launch takes 1 us of the graph. Called by `cuda_transfers`, which reads the slots.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 4096, 8
"""16 bytes a thread. One program does it all: a result has a few kilobytes, and nobody has to count programs then."""


@triton.jit
def outbox_kernel(sources, sizes, places, ring, turn, slot_bytes, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (1). Bytes of each source go to their place in slot `turn`, int32, which moves on to the next one."""
    number = tl.load(turn)
    slot = ring + number * slot_bytes
    for piece in tl.static_range(len(sources)):
        for start in range(0, sizes[piece], BLOCK):
            at = start + tl.arange(0, BLOCK)
            content = tl.load(sources[piece] + at, mask=at < sizes[piece])
            tl.store(slot + places[piece] + at, content, mask=at < sizes[piece])
    tl.debug_barrier()
    tl.store(turn, (number + 1) % SLOTS)  # a count of launches would overflow in weeks


def write_outbox(sources: Sequence[Tensor], places: Sequence[int], ring: Tensor, turn: Tensor) -> None:
    """sources [bytes] uint8 of a device, to byte `places` of a slot; ring [slots, bytes] uint8, pinned; turn [1] int32.

    Nothing waits: the slot holds the result when the stream has come this far.
    """
    sizes = tuple(len(source) for source in sources)
    assert all(size > 1 for size in sizes), sizes  # a 1 in a tuple would be made a constant
    outbox_kernel[(1,)](
        tuple(sources), sizes, tuple(places), ring, turn, ring.shape[1], SLOTS=len(ring), BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
