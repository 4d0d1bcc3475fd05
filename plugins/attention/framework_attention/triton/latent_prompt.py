"""Latent attention of prompts in its expanded form: keys and values of each head, made of latents for the while.

The keys of all prompts of a step stand one request behind the other, each from a multiple of a tile on, and are
expanded a piece at a time: latents are gathered from their blocks (`gather_kernel`), multiplied by the library, and
attended (`latent_prompt_kernel`). The softmax's numbers are carried in float32 from piece to piece, so that no merge is
needed and a piece without keys of a request changes nothing. Called by `latent`. Source: DeepSeek-V2 (arXiv
2405.04434), section 2.1; FlashAttention-2 (arXiv 2307.08691), section 3.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from framework_attention.triton.decode import LOG2_E
from framework_attention.triton.latent_write import rotated


class Expanded(NamedTuple):
    """A piece of P keys: latents [P, R + d_rope], k [P, H * d_nope], v [P, H * d_value]."""

    latents: Tensor
    k: Tensor
    v: Tensor


class Carried(NamedTuple):
    """The softmax of each query between two pieces: top, mass [T, H], total [T, H, d_value] float32."""

    top: Tensor
    mass: Tensor
    total: Tensor


@triton.jit(do_not_specialize=["num_rows", "base"])
def gather_kernel(
    rows, num_rows, starts, base, kv, table, columns, latents,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (P / KEYS,). latents [P, R + d_rope] of places base .. base + P; 0 where a place holds no key of a prompt.

    KEYS divides what `starts` are multiples of, so that a program has keys of one request.
    """
    place = base + tl.program_id(0) * KEYS
    all_rows = tl.arange(0, ROWS)
    begins = tl.load(starts + all_rows, mask=all_rows < num_rows, other=2147483647)
    row = tl.sum((begins <= place).to(tl.int32), axis=0) - 1  # of rows that begin there, all but the last take no place
    queries = tl.load(rows.query_start_loc + row + 1) - tl.load(rows.query_start_loc + row)
    length = tl.where(queries > 1, tl.load(rows.seq_lens + row).to(tl.int32), 0)
    position = place - tl.load(starts + row) + tl.arange(0, KEYS)
    is_key = position < length
    blocks = table + tl.load(rows.idx_mapping + row).to(tl.int64) * columns
    block = tl.load(blocks + position // BLOCK_SIZE, mask=is_key, other=0)
    c = tl.arange(0, WIDTH_PAD)[None, :]
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    x = tl.load(kv + slot[:, None] * WIDTH + c, mask=is_key[:, None] & (c < WIDTH), other=0.0)
    to = latents + (place - base + tl.arange(0, KEYS)).to(tl.int64)[:, None] * WIDTH + c
    tl.store(to, x, mask=tl.full([KEYS, 1], True, tl.int1) & (c < WIDTH))


@triton.jit(do_not_specialize=["base", "num_keys"])
def latent_prompt_kernel(
    q, q_stride, turning, expanded, tiles, carried, out, base, num_keys, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    RANK: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * HEADS,). A piece of num_keys keys from place base on; out [T, H, d_value] is written by the last.

    turning   how queries are rotated, `Turning` without a table for not at all
    IS_FIRST  no piece came before: `carried` is not read. It is written unless IS_LAST
    """
    index, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    record = tiles + index * 8
    queries = tl.load(record)
    if queries == 0:
        return
    token, first, start = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    stored: tl.constexpr = out.dtype.element_ty
    i, n, v = tl.arange(0, QUERIES), tl.arange(0, NOPE_PAD), tl.arange(0, VALUE_PAD)
    is_query = i < queries
    at_q = q + (token + i).to(tl.int64)[:, None] * q_stride + head * (NOPE + ROPE)
    q_nope = tl.load(at_q + n[None, :], mask=is_query[:, None] & (n < NOPE)[None, :], other=0.0)
    position = tl.where(is_query, first + i, first)[:, None]
    q_rope = rotated(at_q + NOPE, turning, position, is_query[:, None], ROPE, ROPE_PAD).to(stored)
    if DOT_F32:
        q_nope, q_rope = q_nope.to(tl.float32), q_rope.to(tl.float32)
    at = (token + i).to(tl.int64) * HEADS + head
    is_total = is_query[:, None] & (v < VALUE)[None, :]
    if IS_FIRST:
        state = (
            tl.full([QUERIES], float("-inf"), tl.float32),
            tl.zeros([QUERIES], tl.float32),
            tl.zeros([QUERIES, VALUE_PAD], tl.float32),
        )
    else:
        state = (
            tl.load(carried.top + at, mask=is_query, other=float("-inf")),
            tl.load(carried.mass + at, mask=is_query, other=0.0),
            tl.load(carried.total + at[:, None] * VALUE + v[None, :], mask=is_total, other=0.0),
        )
    low = tl.maximum(start, base)
    high = tl.minimum(start + first + queries, base + num_keys)
    whole = tl.minimum(start + (first + 1) // TILE * TILE, base + num_keys)  # every query reads the keys before it
    scale_2 = scale * LOG2_E
    state = _attend(
        state, q_nope, q_rope, expanded, head, base, low, whole, start + first + i, scale_2,
        HEADS, NOPE, NOPE_PAD, ROPE, ROPE_PAD, RANK, VALUE, VALUE_PAD, TILE, False,
    )  # fmt: skip
    state = _attend(
        state, q_nope, q_rope, expanded, head, base, tl.maximum(low, whole), high, start + first + i, scale_2,
        HEADS, NOPE, NOPE_PAD, ROPE, ROPE_PAD, RANK, VALUE, VALUE_PAD, TILE, True,
    )  # fmt: skip
    top, mass, total = state
    if IS_LAST:
        result = total / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out + at[:, None] * VALUE + v[None, :], result.to(stored), mask=is_total)
    else:
        tl.store(carried.top + at, top, mask=is_query)
        tl.store(carried.mass + at, mass, mask=is_query)
        tl.store(carried.total + at[:, None] * VALUE + v[None, :], total, mask=is_total)


@triton.jit
def _attend(
    state, q_nope, q_rope, expanded, head, base, begin, end, last, scale_2,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    RANK: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax's (top, mass, total), moved on over places begin .. end, begin at a tile's first.

    last    [QUERIES] place of the last key that each query reads
    MASKED  some queries do not read some of the keys; else all read all
    """
    top, mass, total = state
    n, e, v = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, VALUE_PAD)
    for place in range(begin, end, TILE):
        row = (place - base + tl.arange(0, TILE)).to(tl.int64)[:, None]
        at_key = expanded.k + (row * HEADS + head) * NOPE + n[None, :]
        at_rope = expanded.latents + row * (RANK + ROPE) + RANK + e[None, :]
        at_value = expanded.v + (row * HEADS + head) * VALUE + v[None, :]
        if (NOPE == NOPE_PAD) & (ROPE == ROPE_PAD) & (VALUE == VALUE_PAD):
            key, rope, value = tl.load(at_key), tl.load(at_rope), tl.load(at_value)
        else:
            key = tl.load(at_key, mask=(n < NOPE)[None, :], other=0.0)
            rope = tl.load(at_rope, mask=(e < ROPE)[None, :], other=0.0)
            value = tl.load(at_value, mask=(v < VALUE)[None, :], other=0.0)
        scores = tl.dot(q_nope, tl.trans(key.to(q_nope.dtype)), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope.to(q_rope.dtype)), scores, input_precision="ieee")
        if MASKED:
            readable = (place + tl.arange(0, TILE))[None, :] <= last[:, None]
            scores = tl.where(readable, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_2)
        base_top = new_top
        if MASKED:  # no key so far: -inf - -inf is not a number
            base_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale_2 - base_top[:, None])
        shrink = tl.exp2(top - base_top)
        mass = mass * shrink + tl.sum(weights, axis=1)
        weights = weights.to(value.dtype).to(q_nope.dtype)
        total = tl.dot(weights, value.to(q_nope.dtype), total * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, mass, total
