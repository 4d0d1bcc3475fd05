"""The two products around absorbed latent attention: queries into the space of latents, attended latents out of it.

`absorb_kernel` also writes latents to their slots, and `expand_kernel` also merges the parts that the keys of a query
were cut into, so that a step of decodes is three launches a layer. Called by `latent`; between the two runs
`latent_decode`. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C (both products absorbed).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from framework_attention.triton.latent_write import put_latents, rotated


class LatentParts(NamedTuple):
    """out [parts, H, R] in the model's dtype, each normalised by itself; lse [parts, H] float32, of base 2."""

    out: Tensor
    lse: Tensor


@triton.jit(do_not_specialize=["num_queries"])
def absorb_kernel(
    new, turning, norming, queries, num_queries, up_keys, up_stride, absorbed, kv,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, DOT_F32: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(J, QUERIES) * HEADS * cdiv(RANK, COLUMNS),). absorbed [J, H, R + d_rope]: q_nope @ up_keys, q_rope.

    The latents of its queries are in their slots afterwards. turning, norming: how queries and keys are rotated and
    latents normalised before, `Turning` without a table or weight for not at all
    """
    if DEPENDENT:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (RANK + COLUMNS - 1) // COLUMNS
    block, rest = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    head, begin = rest % HEADS, rest // HEADS * QUERIES
    i = begin + tl.arange(0, QUERIES)
    n, c, e = tl.arange(0, NOPE_PAD), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROPE_PAD)
    is_weight = (n < NOPE)[:, None] & (c < RANK)[None, :]
    weight = tl.load(up_keys + head * up_stride + n[:, None] * RANK + c[None, :], mask=is_weight, other=0.0)
    if DEPENDENT:
        gdc_wait()
    length = tl.load(queries.length + i, mask=i < num_queries, other=-1)
    token = tl.load(queries.token + i, mask=i < num_queries, other=0).to(tl.int64)
    is_query = length > 0
    stored: tl.constexpr = kv.dtype.element_ty
    at_q = new.q + token[:, None] * new.q_stride + head * (NOPE + ROPE)
    x = tl.load(at_q + n[None, :], mask=is_query[:, None] & (n < NOPE)[None, :], other=0.0)
    if DOT_F32:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    y = tl.dot(x, weight, input_precision="ieee")
    to = absorbed + (i.to(tl.int64)[:, None] * HEADS + head) * (RANK + ROPE)
    tl.store(to + c[None, :], y.to(stored), mask=is_query[:, None] & (c < RANK)[None, :])
    if block == 0:
        rope = rotated(at_q + NOPE, turning, length[:, None] - 1, is_query[:, None], ROPE, ROPE_PAD)
        tl.store(to + RANK + e[None, :], rope.to(stored), mask=is_query[:, None] & (e < ROPE)[None, :])
    if head == 0:  # its programs share the latents: a whole one is needed to normalise it
        SHARE: tl.constexpr = triton.next_power_of_2((QUERIES + BLOCKS - 1) // BLOCKS)
        own = block * SHARE + tl.arange(0, SHARE)
        is_own = (own < QUERIES) & (begin + own < num_queries)
        own_length = tl.load(queries.length + begin + own, mask=is_own, other=-1)
        own_token = tl.load(queries.token + begin + own, mask=is_own, other=0).to(tl.int64)
        put_latents(
            new, turning, norming, own_token, own_length - 1, own_length > 0, kv, RANK, RANK_PAD, ROPE, ROPE_PAD
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries"])
def expand_kernel(
    parts_at, parts, queries, num_queries, up_values, up_stride, out,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, MERGE: tl.constexpr, DOT_F32: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(J, QUERIES) * HEADS * cdiv(VALUE, COLUMNS),). out [T, H, d_value], written where there is a query.

    A row of the product is one part of one query: MERGE of each of QUERIES queries at a time, weighted behind it.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (VALUE + COLUMNS - 1) // COLUMNS
    ROWS: tl.constexpr = QUERIES * MERGE
    block, rest = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    head, begin = rest % HEADS, rest // HEADS * QUERIES
    row, c, v = tl.arange(0, ROWS), tl.arange(0, RANK_PAD), block * COLUMNS + tl.arange(0, COLUMNS)
    is_weight = (v < VALUE)[:, None] & (c < RANK)[None, :]
    weight = tl.load(up_values + head * up_stride + v[:, None] * RANK + c[None, :], mask=is_weight, other=0.0)
    if DOT_F32:
        weight = weight.to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    i = begin + row // MERGE
    length = tl.load(queries.length + i, mask=i < num_queries, other=-1)
    first = tl.load(queries.first + i, mask=length >= 0, other=0)
    count = tl.load(parts + first * 8, mask=length > 0, other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, tl.max(count, axis=0), MERGE):
        part = start + row % MERGE
        is_part = part < count
        at = (first + part).to(tl.int64) * HEADS + head
        lse = tl.load(parts_at.lse + at, mask=is_part, other=float("-inf"))
        x = tl.load(parts_at.out + at[:, None] * RANK + c[None, :], mask=is_part[:, None] & (c < RANK), other=0.0)
        y = tl.dot(x.to(weight.dtype), tl.trans(weight), input_precision="ieee")
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, share = tl.exp2(top - base), tl.exp2(lse - base)
        mass = mass * shrink + share
        total = total * shrink[:, None] + y * share[:, None]
        top = new_top
    # Rows of one query come together; of a query of one part the weight is 1, so its bits stay as they are.
    top = tl.reshape(top, (QUERIES, MERGE))
    most = tl.max(top, axis=1)
    share = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most)[:, None])
    whole = tl.sum(tl.reshape(mass, (QUERIES, MERGE)) * share, axis=1)
    sums = tl.sum(tl.reshape(total, (QUERIES, MERGE, COLUMNS)) * share[:, :, None], axis=1)
    result = sums / tl.where(whole > 0, whole, 1.0)[:, None]
    j = begin + tl.arange(0, QUERIES)
    is_query = tl.load(queries.length + j, mask=j < num_queries, other=-1) >= 0
    token = tl.load(queries.token + j, mask=is_query, other=0).to(tl.int64)
    to = out + (token[:, None] * HEADS + head) * VALUE + v[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_query[:, None] & (v < VALUE)[None, :])
