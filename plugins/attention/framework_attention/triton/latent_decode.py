"""Absorbed latent attention: one query over its latents, which are the keys and, but for the rotated part, the values.

A program has one part of one query's keys for some of its heads. Each tile of latents is loaded once, and serves as
keys and as values from the memory that it lies in; it is the left side of both products, whose rows are 64 then, while
the heads, of which there are few, are columns. Called by `latent`, between the two kernels of `latent_products`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from framework_attention.triton.decode import LOG2_E, blocks_of


@triton.jit
def latent_decode_kernel(
    absorbed, kv, table, columns, queries, parts, parts_at, scale,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, DOT_F32: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (parts * cdiv(HEADS, MEMBERS),). absorbed [J, H, R + d_rope], kv [num_blocks, BLOCK_SIZE, R + d_rope].

    parts_at  `LatentParts`, of which each program writes its heads of its part
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    GROUPS: tl.constexpr = (HEADS + MEMBERS - 1) // MEMBERS
    WIDTH: tl.constexpr = RANK + ROPE
    part, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    record = parts + part * 8
    if tl.load(record) == 0:
        return
    query, begin, end = tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    blocks = table + tl.load(queries.row + query).to(tl.int64) * columns
    block = blocks_of(blocks, begin, end, BLOCK_SIZE, TILE)
    head = group * MEMBERS + tl.arange(0, MEMBERS)
    c, e = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    # A query without keys was not absorbed: what stands in its place counts for nothing.
    is_head = head < tl.where(end > begin, HEADS, 0)
    at_q = absorbed + (query.to(tl.int64) * HEADS + head[:, None]) * WIDTH
    q_latent = tl.trans(tl.load(at_q + c[None, :], mask=is_head[:, None] & (c < RANK)[None, :], other=0.0))
    q_rope = tl.trans(tl.load(at_q + RANK + e[None, :], mask=is_head[:, None] & (e < ROPE)[None, :], other=0.0))
    stored: tl.constexpr = kv.dtype.element_ty
    if DOT_F32:
        q_latent, q_rope = q_latent.to(tl.float32), q_rope.to(tl.float32)
    scale_2 = scale * LOG2_E
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    mass = tl.zeros([MEMBERS], tl.float32)
    total = tl.zeros([RANK_PAD, MEMBERS], tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        is_key = at < end
        keys = kv + (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE)[:, None] * WIDTH
        block = blocks_of(blocks, start + TILE, end, BLOCK_SIZE, TILE)  # a turn ahead of its keys
        latent = tl.load(keys + c[None, :], mask=is_key[:, None] & (c < RANK)[None, :], other=0.0)
        rope = tl.load(keys + RANK + e[None, :], mask=is_key[:, None] & (e < ROPE)[None, :], other=0.0)
        latent = latent.to(q_latent.dtype)
        scores = tl.dot(latent, q_latent, input_precision="ieee")
        scores = tl.dot(rope.to(q_rope.dtype), q_rope, scores, input_precision="ieee")
        scores = tl.where(is_key[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=0) * scale_2)
        weights = tl.exp2(scores * scale_2 - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(weights, axis=0)
        weights = weights.to(stored).to(q_latent.dtype)
        total = tl.dot(tl.trans(latent), weights, total * shrink[None, :], input_precision="ieee")
        top = new_top
    at = part.to(tl.int64) * HEADS + head
    is_head = head < HEADS
    tl.store(parts_at.lse + at, top + tl.log2(mass), mask=is_head)
    result = tl.trans(total / tl.where(mass > 0, mass, 1.0)[None, :]).to(stored)
    tl.store(parts_at.out + at[:, None] * RANK + c[None, :], result, mask=is_head[:, None] & (c < RANK)[None, :])
