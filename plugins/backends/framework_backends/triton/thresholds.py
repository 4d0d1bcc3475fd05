"""Exact lower bounds of rows for min-p, top-k and top-p: one float32 a row, which the draw then compares with.

What the groups of a row hold already bounds the answer from below, so that later reads skip most groups: `bracket`
finds that cut, `probe_kernel` counts above it, `settle_kernel` gathers the candidates and searches their float bits.
The references are the stages of those names; ties are kept, and every sum has an order fixed by the row alone.

A row is read once whole (its groups), then only where a group's best reaches the cut: for peaked rows some 20 kB. A
flat row costs two more reads at most, unless it has more candidates than the list holds after `probe_kernel` narrowed
it: then one program walks over it, which is slow and as exact.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.features import Column, entry, processed
from framework_backends.triton.groups import does_draw, is_last_program, kept, measure_row

NUM_PROBES = 16
"""Values of a row at which `probe_kernel` counts. More cost flat rows arithmetic, fewer leave them longer lists."""
_PROBES = tl.constexpr(NUM_PROBES)
_TILE = tl.constexpr(1024)
"""Candidates looked at together: eight bounds are tried on each, and the products stay in registers."""


class Limits(NamedTuple):
    """Columns of the threshold stages, None for those that the step does not run."""

    log_min_p: Column | None
    top_k: Column | None
    top_p: Column | None


class Search(NamedTuple):
    """What is known of each row on the way. The first four are [L].

    cut        float32, nothing below it matters; +inf: the floor, incoming or of min-p, is the answer
    total      float32 mass of the kept in units of exp(best), where the groups tell it, else -1
    fits       int32, 1 where the candidates fit into the list for certain
    lo         float32, the floor and in the end the answer
    counts     [L, blocks, NUM_PROBES] int32 tokens at or above each probe; masses the same in float32
    list       [L, capacity] float32 candidates in the order of their ids
    """

    cut: Any
    total: Any
    fits: Any
    lo: Any
    counts: Any
    masses: Any
    list: Any
    capacity: Any


@triton.jit
def key_of(x):
    """int64 that rises with the float32: order-preserving bits."""
    raw = x.to(tl.int32, bitcast=True)
    return tl.where(raw < 0, raw ^ 0x7FFFFFFF, raw).to(tl.int64)


@triton.jit
def value_of(key):
    raw = key.to(tl.int32)
    return tl.where(raw < 0, raw ^ 0x7FFFFFFF, raw).to(tl.float32, bitcast=True)


@triton.jit
def best_above(best, k, lowest, highest):
    """A value that at least k of `best` reach, close to the largest such value."""
    low = key_of(lowest)
    high = key_of(highest)
    while high - low > 1024:  # some 1e-4 of the value: a closer cut spares nothing
        middle = low + ((high - low + 1) >> 1)
        is_reached = tl.sum((best >= value_of(middle)).to(tl.int32)) >= k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle - 1)
    return value_of(low)


@triton.jit
def mass_above(best, mass, top, target, lowest):
    """A value whose tokens at or above it have `target` mass for certain.

    A group with its best at or above t has there: its best at least, and all its mass but what 127 tokens below t can
    have at most.
    """
    low = key_of(lowest)
    high = key_of(top)
    of_best = tl.exp(best - top)
    while high - low > 1024:
        middle = low + ((high - low + 1) >> 1)
        value = value_of(middle)
        certain = tl.maximum(of_best, mass - 127.0 * tl.exp(value - top))
        is_reached = tl.sum(tl.where(best >= value, certain, 0.0)) >= target
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle - 1)
    return value_of(low)


@triton.jit
def limit_k(limits, request):
    """k of a row, 0 for off."""
    if limits.top_k is None:
        return tl.full((), 0, tl.int32)
    else:
        return entry(limits.top_k, request)


@triton.jit
def limit_p(limits, request):
    """top_p of a row, 1 for off."""
    if limits.top_p is None:
        return tl.full((), 1.0, tl.float32)
    else:
        return entry(limits.top_p, request)


@triton.jit
def bracket(rows, limits, interval, groups, search, row, row_draws, MAX_GROUPS: tl.constexpr):
    """Fills the first four of `search` for a row, from its groups."""
    request = tl.load(rows.req_idx + row)
    group = tl.arange(0, MAX_GROUPS)
    at = row.to(tl.int64) * groups.count + group
    best = tl.load(groups.best + at, mask=group < groups.count, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(best)
    lowest = tl.full((), float("-inf"), tl.float32)
    floor = lowest
    if interval is not None:
        floor = tl.load(interval.lo + row)
    is_known = tl.full((), 1, tl.int32)  # whether the groups tell the mass of what is kept
    if limits.log_min_p is not None:
        log_min_p = entry(limits.log_min_p, request)
        if log_min_p > float("-inf"):
            floor = tl.maximum(floor, top + log_min_p)
            is_known = tl.full((), 0, tl.int32)
    cut = tl.full((), float("inf"), tl.float32)
    total = tl.full((), -1.0, tl.float32)
    if row_draws & (tl.abs(top) < float("inf")):
        k = limit_k(limits, request)
        p = limit_p(limits, request)
        if k > 0:
            cut = tl.maximum(floor, best_above(best, k, lowest, top))
        elif p < 1.0:
            cut = floor
            if is_known != 0:
                mass = tl.load(groups.mass + at, mask=group < groups.count, other=float("-inf"), cache_modifier=".cg")
                mass = tl.exp(mass - top)
                total = tl.sum(mass)
                # The margin is more than rounding can be: a cut that is too low costs little, one too high is wrong.
                cut = tl.maximum(floor, mass_above(best, mass, top, p * total * 1.0001, lowest))
    most = tl.sum((best >= cut).to(tl.int32)) * 128
    tl.store(search.cut + row, cut)
    tl.store(search.total + row, total)
    tl.store(search.fits + row, (most <= search.capacity).to(tl.int32))
    tl.store(search.lo + row, floor)


@triton.jit
def bracket_kernel(
    logits, rows, features, limits, interval, groups, draws, search, counters,
    GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Grid (programs, L), LOOPS blocks of GROUPS groups to a program: the first read, and each row's bounds of it."""
    row = tl.program_id(1)
    row_draws = tl.full((), 1, tl.int32) != 0
    if draws is not None:
        row_draws = does_draw(rows, draws, row)
    measure_row(logits, rows, features, interval, groups, row_draws, row, tl.program_id(0), GROUPS, LOOPS)
    if is_last_program(counters, row, tl.num_programs(0)):
        bracket(rows, limits, interval, groups, search, row, row_draws, MAX_GROUPS)


@triton.jit
def row_best(groups, row, MAX_GROUPS: tl.constexpr):
    group = tl.arange(0, MAX_GROUPS)
    at = row.to(tl.int64) * groups.count + group
    return tl.max(tl.load(groups.best + at, mask=group < groups.count, other=float("-inf")))


@triton.jit
def reaching(groups, row, block, cut, GROUPS: tl.constexpr):
    """[GROUPS] groups of a block whose best is at or above the cut."""
    group = block * GROUPS + tl.arange(0, GROUPS)
    best = tl.load(groups.best + row.to(tl.int64) * groups.count + group, mask=group < groups.count, other=-1e38)
    return (best >= cut) & (group < groups.count)


@triton.jit
def probe_value(cut, top, probe):
    """The probes of a row: the cut, then evenly up to below the best value; behind the last one all is excluded."""
    base = tl.maximum(cut, top - 24.0)
    value = base + (top - base) * (probe.to(tl.float32) / _PROBES)
    return tl.where(probe == 0, cut, tl.where(probe >= _PROBES, float("inf"), value))


@triton.jit
def probe_kernel(logits, rows, features, interval, groups, search, GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr):
    """Grid (blocks, L): counts and masses of a block at or above each probe; of a short row its candidates alone."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    cut = tl.load(search.cut + row)
    if cut == float("inf"):
        return
    fits = tl.load(search.fits + row) != 0
    at = (row.to(tl.int64) * tl.num_programs(0) + block) * _PROBES
    is_wanted = reaching(groups, row, block, cut, GROUPS)
    if tl.max(is_wanted.to(tl.int32)) == 0:
        probe = tl.arange(0, _PROBES)
        tl.store(search.counts + at + probe, tl.zeros((_PROBES,), tl.int32))
        tl.store(search.masses + at + probe, tl.zeros((_PROBES,), tl.float32))
        return
    x = kept(processed(logits, rows, features, row, block * GROUPS * 128, is_wanted, GROUPS), interval, row)
    if fits:
        tl.store(search.counts + at, tl.sum((x >= cut).to(tl.int32)))
    else:
        top = row_best(groups, row, MAX_GROUPS)
        weight = tl.exp(x - top)
        for probe in range(_PROBES):
            is_above = x >= probe_value(cut, top, tl.full((), 0, tl.int32) + probe)
            tl.store(search.counts + at + probe, tl.sum(is_above.to(tl.int32)))
            tl.store(search.masses + at + probe, tl.sum(tl.sum(tl.where(is_above, weight, 0.0), axis=1)))


@triton.jit
def count_of(search, row, num_blocks, probe, MAX_BLOCKS: tl.constexpr):
    """[MAX_BLOCKS] int32 tokens of each block at or above a probe; none behind the last probe."""
    block = tl.arange(0, MAX_BLOCKS)
    at = (row.to(tl.int64) * num_blocks + block) * _PROBES + probe
    return tl.load(search.counts + at, mask=(block < num_blocks) & (probe < _PROBES), other=0)


@triton.jit
def mass_of(search, row, num_blocks, probe, MAX_BLOCKS: tl.constexpr):
    """float32 mass of a row at or above a probe; 0 behind the last."""
    block = tl.arange(0, MAX_BLOCKS)
    at = (row.to(tl.int64) * num_blocks + block) * _PROBES + probe
    return tl.sum(tl.load(search.masses + at, mask=(block < num_blocks) & (probe < _PROBES), other=0.0))


@triton.jit
def narrowed(search, row, num_blocks, k, p, MAX_BLOCKS: tl.constexpr):
    """The last probe that the answer is not below, of a row whose candidates may be too many for the list."""
    target = tl.load(search.total + row)
    if target < 0:
        target = mass_of(search, row, num_blocks, tl.full((), 0, tl.int32), MAX_BLOCKS)
    target = p * target
    found = tl.full((), 0, tl.int32)
    for number in range(1, _PROBES):
        probe = tl.full((), 0, tl.int32) + number
        if k > 0:
            is_reached = tl.sum(count_of(search, row, num_blocks, probe, MAX_BLOCKS)) >= k
        else:
            is_reached = mass_of(search, row, num_blocks, probe, MAX_BLOCKS) >= target
        found = tl.where(is_reached, probe, found)
    return found


@triton.jit
def candidates(logits, rows, features, interval, search, row, tile, count, walks):
    """[_TILE] candidates number tile * _TILE on, -inf behind the last; of a row that is walked over, all its logits."""
    if walks:
        is_wanted = tl.full((_TILE // 128,), 1, tl.int1)
        x = kept(processed(logits, rows, features, row, tile * _TILE, is_wanted, _TILE // 128), interval, row)
        x = tl.reshape(x, (_TILE,))
    else:
        place = tile * _TILE + tl.arange(0, _TILE)
        at = search.list + row.to(tl.int64) * search.capacity + place
        x = tl.load(at, mask=place < count, other=float("-inf"), cache_modifier=".cg")
    return x


@triton.jit
def highest_reaching(
    logits, rows, features, interval, search, row, count, walks, top, low, high, above, goal, BY_MASS: tl.constexpr
):
    """The largest value in low .. high that candidates of `goal` count or mass are not below; low when none is.

    above: count or mass of what is larger than all candidates. Eight bounds are tried a round, so that three bits of
    the answer cost one look at the candidates.
    """
    num_tiles = tl.cdiv(tl.where(walks, logits.vocab, count), _TILE)
    low = key_of(low)
    high = key_of(high)
    number = tl.arange(0, 8)
    while low < high:
        step = (high - low + 7) // 8
        bounds = value_of(tl.minimum(low + step * (number + 1), high))
        sums = tl.zeros((8,), tl.float32)
        tile = tl.full((), 0, tl.int32)
        while tile < num_tiles:
            x = candidates(logits, rows, features, interval, search, row, tile, count, walks)
            weight = tl.exp(x - top) if BY_MASS else tl.full((_TILE,), 1.0, tl.float32)
            sums += tl.sum(tl.where(x[None, :] >= bounds[:, None], weight[None, :], 0.0), axis=1)
            tile += 1
        reached = tl.sum((above + sums >= goal).to(tl.int32)).to(tl.int64)
        failing = tl.minimum(low + step * (reached + 1), high)
        low = tl.where(reached > 0, tl.minimum(low + step * reached, high), low)
        high = tl.where(reached < 8, tl.maximum(failing - 1, low), low)
    return value_of(low)


@triton.jit
def mass_from(logits, rows, features, interval, search, row, count, walks, top, lo):
    """Mass of the candidates at or above lo, in units of exp(top)."""
    total = tl.full((), 0.0, tl.float32)
    num_tiles = tl.cdiv(tl.where(walks, logits.vocab, count), _TILE)
    tile = tl.full((), 0, tl.int32)
    while tile < num_tiles:
        x = candidates(logits, rows, features, interval, search, row, tile, count, walks)
        total += tl.sum(tl.where(x >= lo, tl.exp(x - top), 0.0))
        tile += 1
    return total


@triton.jit
def settle_kernel(
    logits, rows, features, limits, interval, groups, search, counters,
    GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, L): gathers the candidates of each row, then finds the row's bound among them."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    num_blocks = tl.num_programs(0)
    cut = tl.load(search.cut + row)
    if cut == float("inf"):
        return
    request = tl.load(rows.req_idx + row)
    k = limit_k(limits, request)
    p = limit_p(limits, request)
    top = row_best(groups, row, MAX_GROUPS)
    probe = tl.full((), 0, tl.int32)
    behind = tl.full((), 0, tl.int32) + _PROBES
    if tl.load(search.fits + row) == 0:
        total_count = tl.sum(count_of(search, row, num_blocks, probe, MAX_BLOCKS))
        if (total_count > search.capacity) & ((k == 0) | (p >= 1.0)):
            probe = narrowed(search, row, num_blocks, k, p, MAX_BLOCKS)
            behind = probe + 1
    lower = probe_value(cut, top, probe)
    upper = probe_value(cut, top, behind)
    larger = count_of(search, row, num_blocks, behind, MAX_BLOCKS)
    each = count_of(search, row, num_blocks, probe, MAX_BLOCKS) - larger
    count = tl.sum(each)
    number = tl.arange(0, MAX_BLOCKS)
    walks = count > search.capacity
    if (tl.sum(tl.where(number == block, each, 0)) > 0) & (walks == 0):
        is_wanted = reaching(groups, row, block, lower, GROUPS)
        x = kept(processed(logits, rows, features, row, block * GROUPS * 128, is_wanted, GROUPS), interval, row)
        x = tl.reshape(x, (GROUPS * 128,))
        is_in = ((x >= lower) & (x < upper)).to(tl.int32)
        place = tl.sum(tl.where(number < block, each, 0)) + tl.cumsum(is_in, 0) - 1
        tl.store(search.list + row.to(tl.int64) * search.capacity + place, x, mask=is_in != 0)
    if is_last_program(counters, row, num_blocks):
        lo = tl.load(search.lo + row)
        above_count = tl.where(walks, 0, tl.sum(larger)).to(tl.float32)
        lower = tl.where(walks, cut, lower)
        upper = tl.where(walks, top, tl.minimum(upper, top))
        if k > 0:
            kth = highest_reaching(
                logits, rows, features, interval, search, row, count, walks, top, lower, upper, above_count,
                k.to(tl.float32), False,
            )  # fmt: skip
            lo = tl.maximum(lo, kth)
        if p < 1.0:
            total = tl.load(search.total + row)
            if total < 0:
                if (k == 0) & (tl.load(search.fits + row) == 0):
                    total = mass_of(search, row, num_blocks, tl.full((), 0, tl.int32), MAX_BLOCKS)
                else:
                    total = mass_from(logits, rows, features, interval, search, row, count, walks, top, lo)
            above_mass = tl.where(walks, 0.0, mass_of(search, row, num_blocks, behind, MAX_BLOCKS))
            floor = highest_reaching(
                logits, rows, features, interval, search, row, count, walks, top, tl.maximum(lower, lo), upper,
                above_mass, p * total, True,
            )  # fmt: skip
            lo = tl.maximum(lo, floor)
        tl.store(search.lo + row, lo)
