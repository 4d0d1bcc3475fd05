"""One read of the logits: what each group of 128 ids holds at best and in sum, then the token of each row.

`group_kernel` is the fused sampler. Its programs split a row, and the one that ends last goes on with the whole row: a
second launch, and the wait for all other rows, would cost more than the work. The reference is `sampling.draw`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.features import entry, processed
from framework_backends.triton.noise import bits, gumbel_noise


class Groups(NamedTuple):
    """[L, count] float32 each: largest logit of a group, log of its sum of exponentials (of rows that draw)."""

    best: Any
    mass: Any
    count: Any


class Interval(NamedTuple):
    """float32 [L] each: what is kept."""

    lo: Any
    hi: Any


class Chosen(NamedTuple):
    """[L] each: id int64, the same or -1 for a row without a distribution, largest logit, that of the id, log-sum-exp.

    log_sum is of the kept logits, for rows that draw; 0 for greedy ones.
    """

    ids: Any
    told: Any
    top: Any
    value: Any
    log_sum: Any


@triton.jit
def kept(x, interval, row):
    if interval is not None:
        lo = tl.load(interval.lo + row)
        hi = tl.load(interval.hi + row)
        x = tl.where((x >= lo) & (x <= hi), x, float("-inf"))
    return x


@triton.jit
def is_last_program(counters, row, num_programs):
    """Whether all other programs of the row are done, and what they wrote can be read (with cache_modifier=".cg").

    The barrier lets the writes of all threads come before the addition, which releases and acquires on the device. The
    counter is put back to 0 for the next launch.
    """
    tl.debug_barrier()
    done = tl.atomic_add(counters + row, 1)
    is_last = done == num_programs - 1
    if is_last:
        tl.store(counters + row, 0)
    return is_last


@triton.jit
def measure_groups(logits, rows, features, interval, groups, draws, row, block, is_wanted, GROUPS: tl.constexpr):
    """Best and mass of a block of groups of a row. The order of sums is that of the block, whatever the batch is."""
    x = kept(processed(logits, rows, features, row, block * GROUPS * 128, is_wanted, GROUPS), interval, row)
    best = tl.max(x, axis=1)
    group = block * GROUPS + tl.arange(0, GROUPS)
    at = row.to(tl.int64) * groups.count + group
    tl.store(groups.best + at, best, mask=group < groups.count)
    if draws:
        base = tl.where(best == float("-inf"), 0.0, best)
        mass = base + tl.log(tl.sum(tl.exp(x - base[:, None]), axis=1))
        tl.store(groups.mass + at, mass, mask=group < groups.count)


@triton.jit
def first_best(scores, ids):
    """The lowest of the ids with the largest score; a large number when the scores are NaN."""
    return tl.min(tl.where(scores == tl.max(scores), ids, 0x7FFFFFFF))


@triton.jit
def choose_token(logits, rows, features, interval, groups, draws, chosen, row, MAX_GROUPS: tl.constexpr):
    """Draws the row's token in two levels, or takes its best one."""
    group = tl.arange(0, MAX_GROUPS)
    at = row.to(tl.int64) * groups.count + group
    best = tl.load(groups.best + at, mask=group < groups.count, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(best)
    scores = best
    seed = tl.load(rows.seed + row)
    position = tl.load(rows.position + row)
    log_sum = tl.full((), 0.0, tl.float32)
    if draws:
        mass = tl.load(groups.mass + at, mask=group < groups.count, other=float("-inf"), cache_modifier=".cg") - top
        log_sum = top + tl.log(tl.sum(tl.exp(mass)))
        # A group far below the best has a mass that float32 would give as 0 beside it: it cannot win in either form.
        scores = mass + gumbel_noise(bits(seed, position, tl.full((), 0, tl.int32), group))
    picked = tl.minimum(first_best(scores, group), groups.count - 1)
    is_wanted = tl.full((1,), 1, tl.int1)
    x = kept(processed(logits, rows, features, row, picked * 128, is_wanted, 1), interval, row)
    ids = picked * 128 + tl.arange(0, 128)[None, :]
    scores = x
    if draws:
        scores = (x - top) + gumbel_noise(bits(seed, position, tl.full((), 1, tl.int32), ids))
    token = tl.minimum(first_best(scores, ids), logits.vocab - 1)
    value = tl.max(tl.where(ids == token, x, float("-inf")))
    is_sound = (tl.abs(top) < float("inf")) & (tl.abs(value) < float("inf"))
    tl.store(chosen.ids + row, token.to(tl.int64))
    tl.store(chosen.told + row, tl.where(is_sound, token, -1).to(tl.int64))
    tl.store(chosen.top + row, top)
    tl.store(chosen.value + row, value)
    tl.store(chosen.log_sum + row, log_sum)


@triton.jit
def does_draw(rows, draws, row):
    """Whether a row draws; none does without the column."""
    if draws is None:
        return tl.full((), 0, tl.int32) != 0
    else:
        return entry(draws, tl.load(rows.req_idx + row)) != 0


@triton.jit
def measure_row(
    logits, rows, features, interval, groups, draws, row, program, GROUPS: tl.constexpr, LOOPS: tl.constexpr
):
    """`measure_groups` of the LOOPS neighbouring blocks of a program."""
    is_wanted = tl.full((GROUPS,), 1, tl.int1)
    for number in range(LOOPS):
        block = program * LOOPS + number
        measure_groups(logits, rows, features, interval, groups, draws, row, block, is_wanted, GROUPS)


@triton.jit
def group_kernel(
    logits, rows, features, interval, groups, draws, chosen, counters,
    GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr, LOOPS: tl.constexpr, GOES_ON: tl.constexpr,
):  # fmt: skip
    """Grid (programs, L), LOOPS blocks of GROUPS groups to a program: the token of each row, out of one read.

    GOES_ON: the last program of a row draws its token; otherwise `choose_kernel` does, in a launch of its own.
    """
    program = tl.program_id(0)
    row = tl.program_id(1)
    row_draws = does_draw(rows, draws, row)
    measure_row(logits, rows, features, interval, groups, row_draws, row, program, GROUPS, LOOPS)
    goes_on = GOES_ON
    if goes_on:
        goes_on = is_last_program(counters, row, tl.num_programs(0))
    if goes_on:
        choose_token(logits, rows, features, interval, groups, row_draws, chosen, row, MAX_GROUPS)


@triton.jit
def choose_kernel(
    logits, rows, features, interval, groups, draws, chosen, counters, GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr
):
    """Grid (1, L): the token of each row once its groups are measured."""
    row = tl.program_id(1)
    row_draws = does_draw(rows, draws, row)
    choose_token(logits, rows, features, interval, groups, row_draws, chosen, row, MAX_GROUPS)


@triton.jit
def regroup_kernel(
    logits, rows, features, interval, groups, draws, chosen, counters, GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr
):
    """`group_kernel` once the interval has been narrowed: reads groups that hold a kept token, and draws.

    A row whose interval is open has its masses from the first time.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    row_draws = does_draw(rows, draws, row)
    if row_draws:
        lo = tl.load(interval.lo + row)
        if lo > float("-inf"):
            group = block * GROUPS + tl.arange(0, GROUPS)
            at = row.to(tl.int64) * groups.count + group
            is_wanted = tl.load(groups.best + at, mask=group < groups.count, other=float("-inf")) >= lo
            if tl.max(is_wanted.to(tl.int32)) > 0:
                measure_groups(logits, rows, features, interval, groups, True, row, block, is_wanted, GROUPS)
            else:
                empty = tl.full((GROUPS,), float("-inf"), tl.float32)
                tl.store(groups.mass + at, empty, mask=group < groups.count)
    if is_last_program(counters, row, tl.num_programs(0)):
        choose_token(logits, rows, features, interval, groups, row_draws, chosen, row, MAX_GROUPS)
