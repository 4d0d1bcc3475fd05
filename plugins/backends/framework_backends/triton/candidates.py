"""Logits of one row that may be its bound: read from the groups that hold any, and listed once they are few.

`settle_kernel` counts and weighs them at four bounds a time. Every sum has an order that follows from the row alone.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.features import BEHIND, processed
from framework_backends.triton.groups import kept


class Search(NamedTuple):
    """wanted [L, groups] int32 numbers of groups whose best reaches the cut; list [L, capacity] float32 candidates in
    the order of their ids; lo [L] float32, the answer."""

    wanted: Any
    list: Any
    capacity: Any
    lo: Any


STAGES = tl.constexpr(3)
"""Of loops over a row's groups: one program has few loads of its own in flight, so that later ones start early."""
_TILE = tl.constexpr(1024)
"""Listed candidates that are looked at together."""


@triton.jit
def note_wanted(groups, search, row, group, best, cut):
    """Writes down the groups of a row that hold a token and reach the cut, in order; returns how many these are."""
    is_wanted = ((best >= cut) & (best > float("-inf"))).to(tl.int32)
    place = tl.cumsum(is_wanted, 0) - 1
    tl.store(search.wanted + row.to(tl.int64) * groups.count + place, group, mask=is_wanted != 0)
    tl.debug_barrier()
    return tl.sum(is_wanted)


@triton.jit
def wanted_groups(groups, search, row, num_wanted, tile, least, GROUPS: tl.constexpr):
    """[GROUPS] wanted groups number tile * GROUPS on, `BEHIND` for those whose best is below `least`."""
    line = row.to(tl.int64) * groups.count
    place = tile * GROUPS + tl.arange(0, GROUPS)
    group = tl.load(search.wanted + line + place, mask=place < num_wanted, other=BEHIND)
    best = tl.load(groups.best + line + group, mask=place < num_wanted, other=float("-inf"))
    return tl.where(best >= least, group, BEHIND)


@triton.jit
def gather(logits, rows, features, interval, groups, search, row, num_wanted, low, high, GROUPS: tl.constexpr):
    """Lists the logits of wanted groups that are >= low and < high; returns how many these are.

    No more than `capacity` are written.
    """
    line = search.list + row.to(tl.int64) * search.capacity
    count = tl.full((), 0, tl.int32)
    tl.debug_barrier()
    for tile in tl.range(0, tl.cdiv(num_wanted, GROUPS), num_stages=STAGES):
        group = wanted_groups(groups, search, row, num_wanted, tile, low, GROUPS)
        x = kept(processed(logits, rows, features, row, group, GROUPS), interval, row)
        is_in = ((x >= low) & (x < high) & (group < BEHIND)[:, None]).to(tl.int32)
        each = tl.sum(is_in, axis=1)
        start = count + tl.cumsum(each, 0) - each
        place = start[:, None] + tl.cumsum(is_in, 1) - 1
        tl.store(line + place, x, mask=(is_in != 0) & (place < search.capacity))
        count += tl.sum(each)
    tl.debug_barrier()
    return count


@triton.jit
def weight_of(x, top, by_mass):
    return tl.where(by_mass, tl.exp(x - top), 1.0)


@triton.jit
def sums_of_row(
    logits, rows, features, interval, groups, search, row, num_wanted, top, by_mass, a, b, c, d, GROUPS: tl.constexpr
):
    """Counts, or masses in units of exp(top), of the row's logits at or above each of a <= b <= c <= d."""
    of_a = tl.zeros((GROUPS, 128), tl.float32)
    of_b = tl.zeros((GROUPS, 128), tl.float32)
    of_c = tl.zeros((GROUPS, 128), tl.float32)
    of_d = tl.zeros((GROUPS, 128), tl.float32)
    for tile in tl.range(0, tl.cdiv(num_wanted, GROUPS), num_stages=STAGES):
        group = wanted_groups(groups, search, row, num_wanted, tile, a, GROUPS)
        x = kept(processed(logits, rows, features, row, group, GROUPS), interval, row)
        weight = weight_of(x, top, by_mass)
        of_a += tl.where(x >= a, weight, 0.0)
        of_b += tl.where(x >= b, weight, 0.0)
        of_c += tl.where(x >= c, weight, 0.0)
        of_d += tl.where(x >= d, weight, 0.0)
    return tl.sum(tl.sum(of_a, 1)), tl.sum(tl.sum(of_b, 1)), tl.sum(tl.sum(of_c, 1)), tl.sum(tl.sum(of_d, 1))


@triton.jit
def sums_of_list(search, row, count, top, by_mass, a, b, c, d):
    """`sums_of_row` of the list."""
    line = search.list + row.to(tl.int64) * search.capacity
    of_a = tl.zeros((_TILE,), tl.float32)
    of_b = tl.zeros((_TILE,), tl.float32)
    of_c = tl.zeros((_TILE,), tl.float32)
    of_d = tl.zeros((_TILE,), tl.float32)
    tile = tl.full((), 0, tl.int32)
    while tile * _TILE < count:
        place = tile * _TILE + tl.arange(0, _TILE)
        x = tl.load(line + place, mask=place < count, other=float("-inf"))
        weight = weight_of(x, top, by_mass)
        of_a += tl.where(x >= a, weight, 0.0)
        of_b += tl.where(x >= b, weight, 0.0)
        of_c += tl.where(x >= c, weight, 0.0)
        of_d += tl.where(x >= d, weight, 0.0)
        tile += 1
    return tl.sum(of_a), tl.sum(of_b), tl.sum(of_c), tl.sum(of_d)
