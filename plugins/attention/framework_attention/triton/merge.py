"""Parts of one decode's softmax, kept in float32 and merged in the order of its keys.

A part is its largest score (times log2 e), its sum of exponentials and its unnormalised values. For `decode`, whose
programs keep parts and of which the last to end merges them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Parts(NamedTuple):
    """top, mass [items, Hq], total [items, Hq, D] float32."""

    top: Tensor
    mass: Tensor
    total: Tensor


@triton.jit
def keep_part(
    parts_at, item, query_head, is_member, top, mass, total, HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Writes a program's part. query_head, is_member, top, mass [ROWS], total [ROWS, DIM_PAD]."""
    at = item * HEADS + query_head
    d = tl.arange(0, DIM_PAD)[None, :]
    tl.store(parts_at.top + at, top, mask=is_member)
    tl.store(parts_at.mass + at, mass, mask=is_member)
    tl.store(parts_at.total + at[:, None] * DIM + d, total, mask=is_member[:, None] & (d < DIM))


@triton.jit
def merged(
    parts_at, first, parts, head, out, token, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Writes the output of a KV head's queries out of items first .. first + parts, MERGE of them at a time."""
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    member, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    is_member, in_dim = member < GROUP, d < DIM
    query_head = head * GROUP + member
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for start in range(0, parts, MERGE):
        part = start + tl.arange(0, MERGE)
        at = (first + part)[:, None] * (KV_HEADS * GROUP) + query_head[None, :]
        is_in = (part < parts)[:, None] & is_member[None, :]
        # Written by other programs of this launch: past the cache of this multiprocessor.
        tops = tl.load(parts_at.top + at, mask=is_in, other=float("-inf"), cache_modifier=".cg")
        masses = tl.load(parts_at.mass + at, mask=is_in, other=0.0, cache_modifier=".cg")
        where = parts_at.total + at[:, :, None] * DIM + d[None, None, :]
        in_all = is_in[:, :, None] & in_dim[None, None, :]
        totals = tl.load(where, mask=in_all, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        new_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weights = tl.exp2(top - new_top), tl.exp2(tops - new_top[None, :])
        mass = mass * shrink + tl.sum(masses * weights, axis=0)
        total = total * shrink[:, None] + tl.sum(totals * weights[:, :, None], axis=0)
        top = new_top
    to = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + query_head[:, None]) * DIM + d[None, :]
    result = total / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_member[:, None] & in_dim[None, :])
