"""One read of the logits: what each group of 128 ids holds at best and in sum, then the token of each row.

`group_kernel` is the fused sampler. Its programs split a row; its token is drawn by the program that ends last, or in a
launch of its own, which is quicker for many rows. The reference is `sampling.draw`.
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
def measure_groups(logits, rows, features, interval, groups, draws, row, group, lo, GROUPS: tl.constexpr):
    """Best and mass of groups [GROUPS] of a row, of what is at or above lo (None for no bound)."""
    x = kept(processed(logits, rows, features, row, group, GROUPS), interval, row)
    if lo is not None:
        x = tl.where(x >= lo, x, float("-inf"))
    best = tl.max(x, axis=1)
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
def log_of_sum(mass):
    """log of the sum of exp(mass), mass [n] being at most log(128).

    Summed as integers of 2^-40, so that it is the same whatever the number of threads of the kernel is.
    """
    weight = (tl.exp(mass) * 1099511627776.0).to(tl.int64)
    return tl.log(tl.sum(weight).to(tl.float32) * 9.094947017729282e-13)


@triton.jit
def choose_token(logits, rows, features, interval, groups, draws, chosen, row, lo, MAX_GROUPS: tl.constexpr):
    """Draws the row's token in two levels, or takes its best one. lo: as in `measure_groups`."""
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
        log_sum = top + log_of_sum(mass)
        # A group far below the best has a mass that float32 would give as 0 beside it: it cannot win in either form.
        scores = mass + gumbel_noise(bits(seed, position, tl.full((), 0, tl.int32), group))
    picked = tl.minimum(first_best(scores, group), groups.count - 1)
    x = kept(processed(logits, rows, features, row, picked + tl.arange(0, 1), 1), interval, row)
    if lo is not None:
        x = tl.where(x >= lo, x, float("-inf"))
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
def does_draw(rows, draws, chosen, row):
    """Whether a row draws; none does without the column, and all do as far as bounds go, where nothing is chosen."""
    if chosen is None:
        return tl.full((), 1, tl.int32) != 0
    elif draws is None:
        return tl.full((), 0, tl.int32) != 0
    else:
        return entry(draws, tl.load(rows.req_idx + row)) != 0


@triton.jit
def group_kernel(
    logits, rows, features, interval, groups, draws, chosen, counters,
    GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr, GOES_ON: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of GROUPS groups, L): one read of the logits.

    GOES_ON: the last program of a row draws its token; otherwise `choose_kernel` or `settle_kernel` does.
    """
    row = tl.program_id(1)
    row_draws = does_draw(rows, draws, chosen, row)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    measure_groups(logits, rows, features, interval, groups, row_draws, row, group, None, GROUPS)
    if GOES_ON:  # noqa: SIM102 - alone it is a constant, and what then is not there (chosen) is not compiled
        if is_last_program(counters, row, tl.num_programs(0)):
            choose_token(logits, rows, features, interval, groups, row_draws, chosen, row, None, MAX_GROUPS)


@triton.jit
def choose_kernel(logits, rows, features, interval, groups, draws, chosen, MAX_GROUPS: tl.constexpr):
    """Grid (L,): the token of each row once its groups are measured."""
    row = tl.program_id(0)
    row_draws = does_draw(rows, draws, chosen, row)
    choose_token(logits, rows, features, interval, groups, row_draws, chosen, row, None, MAX_GROUPS)
