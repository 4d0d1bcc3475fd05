"""What the groups of a row tell of min-p, top-k and top-p before a single logit is looked at again.

`floor_of` is min-p itself; `cut_of` gives a value that the bounds of top-k and top-p are not below, so that groups
whose best is below it need not be read. Called by `settle_kernel`. The references are the stages of those names.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.features import Column, entry


class Limits(NamedTuple):
    """Columns of the threshold stages, None for those that the step does not run."""

    log_min_p: Column | None
    top_k: Column | None
    top_p: Column | None


@triton.jit
def key_of(x):
    """uint32 that rises with the float32: order-preserving bits."""
    raw = x.to(tl.uint32, bitcast=True)
    return tl.where(raw >> 31 != 0, raw ^ 0xFFFFFFFF, raw ^ 0x80000000)


@triton.jit
def value_of(key):
    return tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


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
def floor_of(limits, request, incoming, top):
    """The incoming lower bound, narrowed by min-p."""
    floor = incoming
    if limits.log_min_p is not None:
        floor = tl.maximum(floor, top + entry(limits.log_min_p, request))
    return floor


_FAR = tl.constexpr(64.0)
"""A token so far below the best one is nothing beside it in float32."""
_HALVINGS = tl.constexpr(13)
"""Of _FAR or less, down to 1 % of a probability: as close as is worth it."""


@triton.jit
def kth_best(best, k, top):
    """Close to the k-th largest of the best values of groups, and not above it; -inf for one far below the first."""
    found = tl.full((), float("-inf"), tl.float32)
    low = top - _FAR
    step = tl.full((), _FAR, tl.float32)
    for _ in range(_HALVINGS):
        step = step * 0.5
        is_reached = tl.sum((best >= low + step).to(tl.int32)) >= k
        low = tl.where(is_reached, low + step, low)
        found = tl.where(is_reached, low, found)
    # The least that reaches it: a row of equal logits then has nothing left to search.
    least = tl.min(tl.where(best >= found, best, float("inf")))
    return tl.where(found == float("-inf"), found, least)


@triton.jit
def mass_certain(best, mass, top, target):
    """A value whose tokens at or above it have `target` mass for certain, in units of exp(top).

    A group with its best at or above t has there: its best at least, and all its mass but what 127 tokens below t can
    have at most.
    """
    found = tl.full((), float("-inf"), tl.float32)
    low = top - _FAR
    step = tl.full((), _FAR, tl.float32)
    of_best = tl.exp(best - top)
    for _ in range(_HALVINGS):
        step = step * 0.5
        certain = tl.maximum(of_best, mass - 127.0 * tl.exp(low + step - top))
        is_reached = tl.sum(tl.where(best >= low + step, certain, 0.0)) >= target
        low = tl.where(is_reached, low + step, low)
        found = tl.where(is_reached, low, found)
    return found


@triton.jit
def mass_possible(best, mass, target, lowest, top):
    """A value, the lowest such or nearly so, above which there cannot be `target` mass: groups count there whole."""
    high = top
    step = tl.minimum(top - lowest, _FAR)
    for _ in range(_HALVINGS):
        step = step * 0.5
        is_reached = tl.sum(tl.where(best >= high - step, mass, 0.0)) >= target
        high = tl.where(is_reached, high, high - step)
    return high


@triton.jit
def cut_of(k, p, floor, is_known, best, mass, top):
    """(cut, ceiling, total): the bound of a row with top-k or top-p is in cut .. ceiling.

    total: mass of what is kept so far, where the groups tell it (is_known, and no top-k comes first), else -1.
    """
    cut = floor
    ceiling = top
    total = tl.full((), -1.0, tl.float32)
    if k > 0:
        cut = tl.maximum(floor, kth_best(best, k, top))
    elif is_known:
        total = tl.sum(mass)
        # The margins are more than rounding can be: a cut too low or a ceiling too high costs little.
        cut = tl.maximum(floor, mass_certain(best, mass, top, p * total * 1.0001))
        ceiling = mass_possible(best, mass, p * total * 0.9999, cut, top)
    return cut, ceiling, total
