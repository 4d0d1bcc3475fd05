"""A step's keys and values into their slots, and heads normalised and rotated in place: one program a token and kind.

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
    new, turning, positions, kv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, QUERY_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (T, QUERY_BLOCKS + blocks of KV heads): queries in place, BLOCK heads each, keys in place as well as both
    keys and values to the slots of `new`, KV_BLOCK heads each.

    turning with neither table nor weights: heads are as they should be, and QUERY_BLOCKS is 0
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stored: tl.constexpr = kv.dtype.element_ty
    d = tl.arange(0, DIM_PAD)[None, :]
    in_dim = d < DIM
    slot = tl.load(new.slots + token)
    position = slot
    if positions is not None:
        position = tl.load(positions + token)
    cos, sin = angles(turning, position, DIM, DIM_PAD)
    if part < QUERY_BLOCKS:
        query_head = (part * BLOCK + tl.arange(0, BLOCK))[:, None]
        at_q = new.q + token * new.q_stride + query_head * DIM
        raw_q = loaded(at_q, turning.q_weight, turning, query_head < HEADS, DIM, DIM_PAD)
        q = turned(raw_q, turning.q_weight, turning, cos, sin, DIM)
        tl.debug_barrier()  # a head is read with its halves swapped before it is overwritten
        tl.store(at_q + d, q.to(stored), mask=(query_head < HEADS) & in_dim)
    else:
        head = ((part - QUERY_BLOCKS) * KV_BLOCK + tl.arange(0, KV_BLOCK))[:, None]
        is_head = head < KV_HEADS
        to = kv + ((slot // BLOCK_SIZE).to(tl.int64) * (2 * KV_HEADS) + head) * (BLOCK_SIZE * DIM)
        to += (slot % BLOCK_SIZE) * DIM + d
        at = new.k + token * new.k_stride + head * DIM
        raw = loaded(at, turning.k_weight, turning, is_head, DIM, DIM_PAD)
        k = turned(raw, turning.k_weight, turning, cos, sin, DIM).to(stored)
        tl.debug_barrier()
        tl.store(to, k, mask=is_head & in_dim)
        if positions is not None:
            tl.store(at + d, k, mask=is_head & in_dim)
        v = tl.load(new.v + token * new.v_stride + head * DIM + d, mask=is_head & in_dim, other=0.0)
        tl.store(to + KV_HEADS * BLOCK_SIZE * DIM, v, mask=is_head & in_dim)
