"""Log-softmax, rank and best ids of rows of logits in one read, split over the vocabulary.

The program that ends last has the row's log-sum-exp and rank together, and takes the best ids out of the groups with
the largest maxima, one group a time. The reference is `sampling.logprobs.measure`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.groups import first_best, is_last_program


class Told(NamedTuple):
    """sampled float32 [n], rank int32 [n]; top_ids int64, top float32, top_ranks int32 [n, k], None without any."""

    sampled: Any
    rank: Any
    top_ids: Any
    top: Any
    top_ranks: Any


@triton.jit
def logits_at(logits, row, ids):
    """float32 logits of a row, -inf behind the vocabulary."""
    at = row.to(tl.int64) * logits.step + ids
    return tl.load(logits.at + at, mask=ids < logits.vocab, other=float("-inf")).to(tl.float32)


_LOW = tl.constexpr(-3.4e38)
"""Stands for a masked -inf while the best are picked, so that -inf is left for what has been told."""


@triton.jit
def tell_best(logits, best, group, told, row, total, k):
    """The k best ids of the row in falling order, the lowest first among equals, with their ranks."""
    value = tl.full((), float("inf"), tl.float32)
    token = tl.full((), -1, tl.int32)
    rank = tl.full((), 0, tl.int32)
    best = tl.maximum(best, _LOW)
    best = tl.where(group * 128 < logits.vocab, best, float("-inf"))
    place = tl.full((), 0, tl.int32)
    while place < k:
        picked = tl.minimum(first_best(best, group), (logits.vocab - 1) // 128)
        ids = picked * 128 + tl.arange(0, 128)
        x = tl.maximum(logits_at(logits, row, ids), _LOW)
        # What has been told stands in front of the last one told, by value and then by id.
        is_left = ((x < value) | ((x == value) & (ids > token))) & (ids < logits.vocab)
        next_value = tl.max(tl.where(is_left, x, float("-inf")))
        next_token = tl.min(tl.where(is_left & (x == next_value), ids, 0x7FFFFFFF))
        next_token = tl.minimum(next_token, logits.vocab - 1)
        is_left = is_left & ((x < next_value) | ((x == next_value) & (ids > next_token)))
        best = tl.where(group == picked, tl.max(tl.where(is_left, x, float("-inf"))), best)
        rank = tl.where(next_value == value, rank, place + 1)
        value = next_value
        token = next_token
        tl.store(told.top_ids + row * k + place, token.to(tl.int64))
        tl.store(told.top + row * k + place, tl.where(value > _LOW, value, float("-inf")) - total)
        tl.store(told.top_ranks + row * k + place, rank)
        place += 1


@triton.jit
def tell_row(
    logits, own, groups, larger, told, row, num_blocks, k, IS_LOG: tl.constexpr,
    MAX_GROUPS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What the blocks of a row say together."""
    number = tl.arange(0, MAX_BLOCKS)
    counts = tl.load(larger + row * num_blocks + number, mask=number < num_blocks, other=0, cache_modifier=".cg")
    group = tl.arange(0, MAX_GROUPS)
    at = row.to(tl.int64) * groups.count + group
    best = tl.load(groups.best + at, mask=group < groups.count, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(groups.mass + at, mask=group < groups.count, other=float("-inf"), cache_modifier=".cg")
    total = tl.full((), 0.0, tl.float32)
    if IS_LOG:
        top = tl.max(best)
        total = top + tl.log(tl.sum(tl.exp(mass - top)))
    tl.store(told.sampled + row, own - total)
    tl.store(told.rank + row, tl.sum(counts) + 1)
    if told.top_ids is not None:
        tell_best(logits, best, group, told, row, total, k)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["ids"])
def logprobs_kernel(
    logits, ids, groups, larger, told, counters, k, IS_LOG: tl.constexpr, GROUPS: tl.constexpr,
    MAX_GROUPS: tl.constexpr, MAX_BLOCKS: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Grid (programs, n), LOOPS blocks of GROUPS groups to a program. larger [n, programs] int32."""
    program = tl.program_id(0)
    row = tl.program_id(1)
    own = tl.load(logits.at + row.to(tl.int64) * logits.step + tl.load(ids + row)).to(tl.float32)
    count = tl.full((), 0, tl.int32)
    for number in range(LOOPS):
        group = (program * LOOPS + number) * GROUPS + tl.arange(0, GROUPS)
        x = logits_at(logits, row, group[:, None] * 128 + tl.arange(0, 128)[None, :])
        best = tl.max(x, axis=1)
        base = tl.where(best == float("-inf"), 0.0, best)
        mass = base + tl.log(tl.sum(tl.exp(x - base[:, None]), axis=1))
        at = row.to(tl.int64) * groups.count + group
        tl.store(groups.best + at, best, mask=group < groups.count)
        tl.store(groups.mass + at, mass, mask=group < groups.count)
        count += tl.sum((x > own).to(tl.int32))
    tl.store(larger + row * tl.num_programs(0) + program, count)
    if is_last_program(counters, row, tl.num_programs(0)):
        tell_row(logits, own, groups, larger, told, row, tl.num_programs(0), k, IS_LOG, MAX_GROUPS, MAX_BLOCKS)
