"""A step's keys and values into their slots, keys normalised and rotated: one program a token.

For steps with prompts, and for every step of `batch_invariant`; a step of decodes does this inside `decode`. Called by
`attention`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_attention.triton.heads import angles, loaded, turned


@triton.jit
def write_kernel(
    new, turning, positions, rotated, kv,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of BLOCK KV heads). Reads keys and values of `new` and writes them to its slots.

    positions  [T] int64, None without a rotation
    rotated    [T, Hk, D], gets the keys as they are in their slots, one behind the other; None where nobody reads them
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, DIM_PAD)[None, :]
    is_head = head < KV_HEADS
    mask = is_head & (d < DIM)
    raw = loaded(new.k + token * new.k_stride + head * DIM, turning.k_weight, turning, is_head, DIM, DIM_PAD)
    v = tl.load(new.v + token * new.v_stride + head * DIM + d, mask=mask, other=0.0)
    slot = tl.load(new.slots + token)
    position = slot
    if positions is not None:
        position = tl.load(positions + token)
    cos, sin = angles(turning, position + tl.zeros([1, 1], tl.int64), DIM, DIM_PAD)
    k = turned(raw, turning.k_weight, turning, cos, sin, DIM).to(kv.dtype.element_ty)
    to = kv + ((slot // BLOCK_SIZE).to(tl.int64) * (2 * KV_HEADS) + head) * (BLOCK_SIZE * DIM)
    to += (slot % BLOCK_SIZE) * DIM + d
    tl.store(to, k, mask=mask)
    tl.store(to + KV_HEADS * BLOCK_SIZE * DIM, v, mask=mask)
    if rotated is not None:
        tl.store(rotated + (token * KV_HEADS + head) * DIM + d, k, mask=mask)
