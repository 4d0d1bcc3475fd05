"""Decode attention: one query token a request over its cached keys, in one launch a layer whatever the lengths are.

A program has the heads of one KV head, packed to the rows of a matrix product, and one item of `items`: a part of one
request's keys. The program of a request's last part also normalises and rotates the new key, writes key and value to
their slot and starts its softmax from them, so that what is written is never read back in the launch. The last program
of a request and KV head to end merges the parts, in their order. Called by `attention`; the merge is in `merge`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from framework_attention.triton.heads import LOG2_E, angles, capped, loaded, sinks_of, turned
from framework_attention.triton.merge import keep_part, merged


class Paged(NamedTuple):
    """KV memory [num_blocks, 2, Hk, block_size, D] and the block table [rows, columns] int32.

    How many columns is told apart: there may be one, and Triton 3.6 loses a 1 of a tuple under an `if`.
    """

    kv: Tensor
    table: Tensor


@triton.jit
def decode_kernel(
    new, turning, paged, columns, items, parts_at, arrived, out, scale, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MERGE: tl.constexpr,
    DOT_F32: tl.constexpr, LETS_BEGIN: tl.constexpr,
):  # fmt: skip
    """Grid (items * KV_HEADS,). out [T, Hq, D].

    GROUP heads of a KV head in ROWS >= 16 rows; TILE keys a turn; MERGE parts merged at a time; SOFTCAP 0 for none
    sinks    [Hq], None without: they count in the part that has the token's own key, and so once
    LETS_BEGIN: a kernel behind this one that waits by itself may begin meanwhile, and ask for its weights
    arrived  [items, KV_HEADS] int32, 0 before and after: parts of the request that begins at an item and have ended
    """
    if LETS_BEGIN:
        gdc_launch_dependents()
    item, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    record = items + item * 8
    parts = tl.load(record)
    if parts == 0:
        return
    part, token, table_row = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    begin, end, length = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6)
    stored: tl.constexpr = paged.kv.dtype.element_ty
    table = paged.table + table_row.to(tl.int64) * columns
    block = blocks_of(table, begin, end, BLOCK_SIZE, TILE)
    d, member = tl.arange(0, DIM_PAD), tl.arange(0, ROWS)
    is_member = member < GROUP
    query_head = head * GROUP + member
    is_last = (part == parts - 1) & (length > 0)
    # Only the program of the last part has the token's own key and value; in the others they are 0.
    zero = tl.zeros([1, 1], tl.int32)
    one = (zero + part == parts - 1) & (zero + length > 0)
    at_q = new.q + token.to(tl.int64) * new.q_stride + query_head[:, None] * DIM
    at_k = new.k + token.to(tl.int64) * new.k_stride + head * DIM + tl.zeros([1, 1], tl.int32)
    at_v = new.v + token.to(tl.int64) * new.v_stride + head * DIM + d[None, :]
    in_dim = (d < DIM)[None, :]
    raw_q = loaded(at_q, turning.q_weight, turning, is_member[:, None], DIM, DIM_PAD)
    raw_k = loaded(at_k, turning.k_weight, turning, one, DIM, DIM_PAD)
    v = tl.load(at_v, mask=one & in_dim, other=0.0)
    slot = tl.load(new.slots + token)
    cos, sin = angles(turning, length - 1 + tl.zeros([1, 1], tl.int32), DIM, DIM_PAD)
    q = turned(raw_q, turning.q_weight, turning, cos, sin, DIM)
    k = turned(raw_k, turning.k_weight, turning, cos, sin, DIM)
    _write(paged, slot, head, d[None, :], one & in_dim, k.to(stored), v, KV_HEADS, DIM, BLOCK_SIZE)
    scale_2 = scale * LOG2_E
    own = tl.sum(q * k, axis=1) * scale_2
    unit = scale_2  # what makes scores of products in the loop
    if SOFTCAP > 0:
        own = capped(tl.sum(q * k, axis=1), scale_2, SOFTCAP)
        unit = 1.0
    top = tl.where(is_last, own, float("-inf"))
    mass = tl.where(is_last, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM_PAD], tl.float32) + v.to(tl.float32)
    if sinks is not None:
        sink = sinks_of(sinks, query_head, is_member)
        top = tl.where(is_last, tl.maximum(own, sink), float("-inf"))
        share = tl.where(is_last, tl.exp2(own - tl.maximum(own, sink)), 0.0)
        mass = share + tl.where(is_last, tl.exp2(sink - tl.maximum(own, sink)), 0.0)
        total = total * share[:, None]
    q = q if DOT_F32 else q.to(stored)
    keys = paged.kv + head * (BLOCK_SIZE * DIM) + d[None, :]
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        is_key = at < end
        if WINDOW > 0:
            is_key = is_key & (at >= length - WINDOW)
        place = block.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * DIM) + (at % BLOCK_SIZE) * DIM
        block = blocks_of(table, start + TILE, end, BLOCK_SIZE, TILE)  # a turn ahead of its keys
        mask = is_key[:, None] & in_dim
        k_tile = tl.load(keys + place[:, None], mask=mask, other=0.0)
        v_tile = tl.load(keys + place[:, None] + KV_HEADS * BLOCK_SIZE * DIM, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k_tile.to(q.dtype)), input_precision="ieee")
        if SOFTCAP > 0:
            scores = capped(scores, scale_2, SOFTCAP)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * unit)
        weights = tl.exp2(scores * unit - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(weights, axis=1)
        weights = weights.to(stored).to(q.dtype)
        total = tl.dot(weights, v_tile.to(q.dtype), total * shrink[:, None], input_precision="ieee")
        top = new_top
    to = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + query_head[:, None]) * DIM + d[None, :]
    if parts == 1:
        result = total / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(to, result.to(stored), mask=is_member[:, None] & in_dim)
    else:
        keep_part(parts_at, item, query_head, is_member, top, mass, total, KV_HEADS * GROUP, DIM, DIM_PAD)
        tl.debug_barrier()  # every thread's part is there before this program counts as arrived
        counter = arrived + (item - part) * KV_HEADS + head
        if tl.atomic_add(counter, 1) == parts - 1:
            merged(parts_at, item - part, parts, head, out, token, KV_HEADS, GROUP, DIM, DIM_PAD, MERGE)
            tl.store(counter, 0)


@triton.jit
def blocks_of(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Blocks of keys start .. start + TILE: one where a tile lies in one block, else [TILE]; the null block from end
    on."""
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        at = start + tl.arange(0, TILE)
        block = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0)
    return block


@triton.jit
def _write(
    paged, slot, head, d, mask, k, v, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """One token's key and value of a head, [1, DIM_PAD], to its slot."""
    to = paged.kv + ((slot // BLOCK_SIZE).to(tl.int64) * (2 * KV_HEADS) + head) * (BLOCK_SIZE * DIM)
    to += (slot % BLOCK_SIZE) * DIM + d
    tl.store(to, k, mask=mask)
    tl.store(to + KV_HEADS * BLOCK_SIZE * DIM, v, mask=mask)
