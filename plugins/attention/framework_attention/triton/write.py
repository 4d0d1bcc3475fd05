"""A step's keys and values into their slots, keys normalised and rotated: some tokens a program. And queries alike,
into a tensor, for whoever does not rotate them itself.

For steps with prompts, and for every step of `batch_invariant`; a step of decodes does this inside `decode`. Called by
`attention`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_attention.triton.heads import angles, loaded, turned


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    new, turning, positions, num_tokens, rotated, kv,
    KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (T * HEADS_PAD / ROWS,). Reads keys and values of `new` and writes them to its slots.

    ROWS       row r is KV head r % HEADS_PAD of token r // HEADS_PAD
    positions  [T] int64, None without a rotation
    rotated    [T, Hk, D], gets the keys as they are in their slots, one behind the other; None where nobody reads them
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token, head = (row // HEADS_PAD).to(tl.int64), row % HEADS_PAD
    d = tl.arange(0, DIM_PAD)[None, :]
    is_row = (token < num_tokens) & (head < KV_HEADS)
    mask = is_row & (d < DIM)
    raw = loaded(new.k + token * new.k_stride + head * DIM, turning.k_weight, turning, is_row, DIM, DIM_PAD)
    v = tl.load(new.v + token * new.v_stride + head * DIM + d, mask=mask, other=0.0)
    slot = tl.load(new.slots + token, mask=is_row, other=0)
    position = slot * 0
    if positions is not None:
        position = tl.load(positions + token, mask=is_row, other=0)
    cos, sin = angles(turning, position, DIM, DIM_PAD)
    k = turned(raw, turning.k_weight, turning, cos, sin, DIM).to(kv.dtype.element_ty)
    to = kv + ((slot // BLOCK_SIZE).to(tl.int64) * (2 * KV_HEADS) + head) * (BLOCK_SIZE * DIM)
    to += (slot % BLOCK_SIZE) * DIM + d
    tl.store(to, k, mask=mask)
    tl.store(to + KV_HEADS * BLOCK_SIZE * DIM, v, mask=mask)
    if rotated is not None:
        tl.store(rotated + (token * KV_HEADS + head) * DIM + d, k, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def turn_kernel(
    new, turning, positions, num_tokens, out,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (T * HEADS_PAD / ROWS,). out [T, HEADS, D]: the step's queries, normalised and rotated. positions as in
    `write_kernel`."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token, head = (row // HEADS_PAD).to(tl.int64), row % HEADS_PAD
    d = tl.arange(0, DIM_PAD)[None, :]
    is_row = (token < num_tokens) & (head < HEADS)
    raw = loaded(new.q + token * new.q_stride + head * DIM, turning.q_weight, turning, is_row, DIM, DIM_PAD)
    position = token * 0
    if positions is not None:
        position = tl.load(positions + token, mask=is_row, other=0)
    cos, sin = angles(turning, position, DIM, DIM_PAD)
    q = turned(raw, turning.q_weight, turning, cos, sin, DIM).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head) * DIM + d, q, mask=is_row & (d < DIM))
