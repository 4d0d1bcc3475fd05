"""One program to a row: its exact bound of top-k and top-p, and its token, out of the groups that may hold either.

`group_kernel` has read the row once. Here a row's candidates are listed, and the bound is searched among their float
bits, four values a round. A peaked row reads some fifty groups. A flat one, whose candidates are too many for the list,
is counted over at four values until those between two of them fit. Ties are kept. `thresholds` has the references.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_backends.triton.candidates import (
    STAGES,
    gather,
    note_wanted,
    sums_of_list,
    sums_of_row,
    wanted_groups,
    weight_of,
)
from framework_backends.triton.groups import choose_token, does_draw, measure_groups
from framework_backends.triton.thresholds import cut_of, floor_of, key_of, limit_k, limit_p, value_of

_PARTS = tl.constexpr(16)
"""Groups of which a row is likely to have no more than 128 / 16 candidates each: then they are listed unasked."""


@triton.jit
def steps_of_value(low, high, skipped):
    """Four bounds that divide low .. high evenly, which suits rows as they are made; skipped 0: the first is low."""
    ceiling = tl.minimum(high, 3.4028234663852886e38)
    base = tl.maximum(low, ceiling - 64.0)
    step = (ceiling - base) * 0.2
    number = skipped.to(tl.float32)
    first = tl.where(skipped == 0, low, base + step * number)
    return first, base + step * (number + 1), base + step * (number + 2), base + step * (number + 3)


@triton.jit
def steps_of_bits(low, high):
    """Four bounds, the last one the value below high: any row comes to an end."""
    first = key_of(low)
    last = key_of(high) - 1
    step = tl.maximum((last - first) >> 2, 1)
    second = tl.minimum(first + step, last)
    third = tl.minimum(second + step, last)
    return value_of(second), value_of(third), value_of(tl.minimum(third + step, last)), value_of(last)


@triton.jit
def last_true(at_a, at_b, at_c, at_d, otherwise, a, b, c, d):
    """What stands at the last of four bounds that are reached; none is behind one that is not."""
    return tl.where(at_d, d, tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, otherwise))))


@triton.jit
def first_false(at_a, at_b, at_c, at_d, a, b, c, d, otherwise):
    return tl.where(at_a, tl.where(at_b, tl.where(at_c, tl.where(at_d, otherwise, d), c), b), a)


@triton.jit
def find_bound(
    logits, rows, features, interval, groups, search, row, num_wanted, k, p, cut, ceiling, total, top,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The bound of top-k and then of top-p among logits from the cut on: it is the largest value that candidates of k
    count, or of p * total mass, are not below."""
    lo = cut
    count = tl.full((), 0, tl.int32)
    is_whole = tl.full((), 0, tl.int32)
    if num_wanted * _PARTS <= search.capacity:
        count = gather(logits, rows, features, interval, groups, search, row, num_wanted, cut, float("inf"), GROUPS)
        is_whole = (count <= search.capacity).to(tl.int32)
    for mass in range(2):
        by_mass = mass != 0
        # A whole list of fewer than k leaves the cut, which is then the floor.
        if tl.where(by_mass, p < 1.0, (k > 0) & ((is_whole == 0) | (count >= k))):
            # The bound is in low .. high without high; from_low and above are the sums at or above either.
            low = lo
            high = value_of(key_of(tl.where(by_mass & (k == 0), ceiling, top)) + 1)
            goal = tl.where(by_mass, p * total, k.to(tl.float32))
            skipped = tl.where(by_mass & (total < 0), 0, 1)  # 0: the first bound is low, to know the total
            from_low = tl.where(by_mass, tl.where(total < 0, float("inf"), total), num_wanted * 128.0)
            above = tl.full((), 0.0, tl.float32)
            beyond = tl.full((), 0.0, tl.float32)  # what is above the list
            is_listed = is_whole
            is_even = tl.full((), 1, tl.int32)
            while key_of(high) - key_of(low) > 1:
                if is_even != 0:
                    a, b, c, d = steps_of_value(low, high, skipped)
                else:
                    a, b, c, d = steps_of_bits(low, high)
                if is_listed != 0:
                    of_a, of_b, of_c, of_d = sums_of_list(search, row, count, top, by_mass, a, b, c, d)
                else:
                    of_a, of_b, of_c, of_d = sums_of_row(
                        logits, rows, features, interval, groups, search, row, num_wanted, top, by_mass, a, b, c, d,
                        GROUPS,
                    )  # fmt: skip
                if skipped == 0:
                    goal = p * of_a
                # Sums over nested sets in one order: none is larger than the one in front of it, rounding included.
                at_a = beyond + of_a >= goal
                at_b = beyond + of_b >= goal
                at_c = beyond + of_c >= goal
                at_d = beyond + of_d >= goal
                low = last_true(at_a, at_b, at_c, at_d, low, a, b, c, d)
                from_low = last_true(at_a, at_b, at_c, at_d, from_low, of_a, of_b, of_c, of_d)
                high = first_false(at_a, at_b, at_c, at_d, a, b, c, d, high)
                above = first_false(at_a, at_b, at_c, at_d, of_a, of_b, of_c, of_d, above)
                skipped = tl.full((), 1, tl.int32)
                is_even = 1 - is_even
                if (is_listed == 0) & (key_of(high) - key_of(low) > 1):
                    # So many at most: none weighs less than one at low.
                    most = (from_low - above) / weight_of(low, top, by_mass)
                    if most < search.capacity:
                        count = gather(
                            logits, rows, features, interval, groups, search, row, num_wanted, low, high, GROUPS
                        )
                        is_listed = (count <= search.capacity).to(tl.int32)
                        beyond = tl.where(is_listed != 0, above, 0.0)
            lo = low
    return lo


@triton.jit
def measure_kept(
    logits, rows, features, interval, groups, search, row, num_wanted, group, best, lo, GROUPS: tl.constexpr
):
    """Masses of what is kept: of groups that hold some, anew; none for the others."""
    empty = tl.full(best.shape, float("-inf"), tl.float32)
    at = groups.mass + row.to(tl.int64) * groups.count + group
    tl.store(at, empty, mask=(group < groups.count) & (best < lo))
    for tile in tl.range(0, tl.cdiv(num_wanted, GROUPS), num_stages=STAGES):
        some = wanted_groups(groups, search, row, num_wanted, tile, lo, GROUPS)
        measure_groups(logits, rows, features, interval, groups, True, row, some, lo, GROUPS)
    tl.debug_barrier()


@triton.jit
def settle_kernel(
    logits, rows, features, interval, groups, draws, chosen, limits, search,
    GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (L,): the token of each row behind its thresholds; without `chosen` its lower bound, in search.lo."""
    row = tl.program_id(0)
    request = tl.load(rows.req_idx + row)
    group = tl.arange(0, MAX_GROUPS)
    at = row.to(tl.int64) * groups.count + group
    best = tl.load(groups.best + at, mask=group < groups.count, other=float("-inf"))
    top = tl.max(best)
    incoming = tl.full((), float("-inf"), tl.float32)
    if interval is not None:
        incoming = tl.load(interval.lo + row)
    row_draws = does_draw(rows, draws, chosen, row)
    lo = incoming
    if row_draws & (tl.abs(top) < float("inf")):
        floor = floor_of(limits, request, incoming, top)
        lo = floor
        k = limit_k(limits, request)
        p = limit_p(limits, request)
        is_searched = (k > 0) | (p < 1.0)
        if is_searched | (floor > incoming):
            cut = floor
            ceiling = top
            total = tl.full((), -1.0, tl.float32)
            if is_searched:
                mass = tl.load(groups.mass + at, mask=group < groups.count, other=float("-inf"))
                mass = tl.exp(mass - top)
                cut, ceiling, total = cut_of(k, p, floor, floor == incoming, best, mass, top)
            num_wanted = note_wanted(groups, search, row, group, best, cut)
            if is_searched:
                lo = find_bound(
                    logits, rows, features, interval, groups, search, row, num_wanted, k, p, cut, ceiling, total, top,
                    GROUPS,
                )  # fmt: skip
            if chosen is not None:
                measure_kept(logits, rows, features, interval, groups, search, row, num_wanted, group, best, lo, GROUPS)
    if chosen is None:
        tl.store(search.lo + row, lo)
    else:
        choose_token(logits, rows, features, interval, groups, row_draws, chosen, row, lo, MAX_GROUPS)
