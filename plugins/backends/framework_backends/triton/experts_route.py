"""Which experts each token gets, with what weights, and the tokens of each expert side by side: one launch.

The reference is `route` of `framework.layers.experts`. Places are given out on the device and nothing is read back:
shapes follow from the numbers of tokens, choices and experts alone. Called by `cuda_experts`; `experts_products` reads
the tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from framework_backends.triton.groups import is_last_program
from framework_backends.triton.launches import let_next_begin, wait_for_previous

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""What can be chosen is not below it, so that -inf stands for what cannot, and NaN chooses nothing twice."""


class Chosen(NamedTuple):
    """Of T tokens: ids [T, k] int32, or None where they are sorted; weights [T, k] float32."""

    ids: Any
    weights: Any


class Sorted(NamedTuple):
    """Pairs, token * k + choice, by expert.

    pairs  [E, T] int32: the pairs of an expert, in any order; as many as it was given
    tiles  [n, 4] int32: expert, first place in its row of `pairs`, number of pairs, place among the pairs of all
    count  [1] int32: of tiles
    """

    pairs: Any
    tiles: Any
    count: Any


class Counters(NamedTuple):
    """counts [E] int64, tokens of each expert so far; own [E + 1] int32, 0 before and after a launch."""

    counts: Any
    own: Any


@triton.jit
def real_tokens(num_tokens, T):
    """How many of T tokens are no padding."""
    if num_tokens is None:
        return T
    else:
        return tl.minimum(tl.load(num_tokens), T)


@triton.jit
def scores_of(logits, inside, SCORES: tl.constexpr):
    """float32 scores of logits [n, E]. inside: columns that are experts."""
    if SCORES == "softmax":
        x = tl.where(inside, logits, float("-inf"))
        x = tl.exp(x - tl.max(x, axis=1)[:, None])
        return x / tl.sum(x, axis=1)[:, None]
    elif SCORES == "sigmoid":
        return 1.0 / (tl.exp(-logits) + 1.0)
    else:
        return logits


@triton.jit
def best_of(x):
    """(largest value, its lowest place) of each row."""
    return tl.max(x, axis=1, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def within_groups(
    wanted, e, E, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, TOP2: tl.constexpr, ROWS: tl.constexpr, G2: tl.constexpr
):
    """wanted [ROWS, n] with LOWEST for experts of groups that are not chosen. G2: GROUPS or the power of 2 above."""
    group = e // (E // GROUPS)
    numbers = tl.arange(0, G2)[None, :]
    value = tl.full((ROWS, G2), float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where(group == g, wanted, float("-inf"))
        best, place = best_of(own)
        if TOP2:
            best += tl.max(tl.where(e == place[:, None], float("-inf"), own), axis=1)
        value = tl.where(numbers == g, best[:, None], value)
    kept = wanted < float("-inf")
    for _ in tl.static_range(CHOSEN):
        _, place = best_of(value)
        kept = kept | (group == place[:, None])
        value = tl.where(numbers == place[:, None], float("-inf"), value)
    return tl.where(kept, wanted, tl.minimum(wanted, LOWEST))


@triton.jit
def choices_of(scores, wanted, e, ROWS: tl.constexpr, E2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr):
    """(choice [ROWS, E2] that an expert is, -1 for none; ids [ROWS, K2]; scores [ROWS, K2] of them)."""
    choice = tl.full((ROWS, E2), -1, tl.int32)
    ids = tl.zeros((ROWS, K2), tl.int32)
    weights = tl.zeros((ROWS, K2), tl.float32)
    numbers = tl.arange(0, K2)[None, :]
    for j in tl.static_range(K):
        _, place = best_of(wanted)
        is_it = e == place[:, None]
        score = tl.sum(tl.where(is_it, scores, 0.0), axis=1)
        choice = tl.where(is_it, j, choice)
        ids = tl.where(numbers == j, place[:, None], ids)
        weights = tl.where(numbers == j, score[:, None], weights)
        wanted = tl.where(is_it, float("-inf"), wanted)
    return choice, ids, weights


@triton.jit
def weights_of(scores, K: tl.constexpr, K2: tl.constexpr, SCORES: tl.constexpr, NORMALIZES: tl.constexpr, scale):
    """Weights of the scores [n, K2] of what is chosen; those from K on mean nothing."""
    inside = tl.arange(0, K2)[None, :] < K
    weights = scores
    if SCORES == "selected":
        weights = scores_of(scores, inside, "softmax")
    if NORMALIZES:
        weights = weights / (tl.sum(tl.where(inside, weights, 0.0), axis=1)[:, None] + 1e-20)
    return weights * scale


@triton.jit
def lay_out_tiles(into, counters, E, E2: tl.constexpr, BM: tl.constexpr):
    """Tiles of up to BM pairs of one expert; the counts of this launch go over to those of all."""
    e = tl.arange(0, E2)
    inside = e < E
    count = tl.load(counters.own + e, mask=inside, other=0, cache_modifier=".cg")
    tl.store(counters.own + e, tl.zeros_like(count), mask=inside)
    before = tl.load(counters.counts + e, mask=inside, other=0)
    tl.store(counters.counts + e, before + count, mask=inside)
    place = tl.cumsum(count, axis=0) - count
    tiles = (count + (BM - 1)) // BM
    at = into.tiles + (tl.cumsum(tiles, axis=0) - tiles) * 4
    tl.store(into.count, tl.sum(tiles, axis=0))
    for i in range(tl.max(tiles, axis=0)):
        mask = i < tiles
        tl.store(at + i * 4, e, mask=mask)
        tl.store(at + i * 4 + 1, tl.zeros_like(e) + i * BM, mask=mask)
        tl.store(at + i * 4 + 2, tl.minimum(count - i * BM, BM), mask=mask)
        tl.store(at + i * 4 + 3, place + i * BM, mask=mask)


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits, stride, bias, scale, chosen, into, counters, num_tokens, T, E: tl.constexpr,
    K: tl.constexpr, K2: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr,
    SCORES: tl.constexpr, NORMALIZES: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, G2: tl.constexpr, BM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS tokens,): chosen, and pairs and tiles of up to BM of them unless `into` is None.

    logits [T, E] float32 with rows `stride` apart; bias [E] float32 or None. E2, K2, G2: E, K, GROUPS or the powers of
    2 above. Places among an expert's pairs go to programs as they come: products of rows do not depend on them.
    """
    let_next_begin(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, E2)[None, :]
    inside = e < E
    wait_for_previous(DEPENDENT)
    is_real = row < real_tokens(num_tokens, T)
    at = logits + row.to(tl.int64)[:, None] * stride + e
    x = tl.load(at, mask=(row < T)[:, None] & inside, other=0.0)
    scores = scores_of(x, inside, SCORES)
    wanted = scores
    if bias is not None:
        wanted += tl.load(bias + e, mask=inside, other=0.0)
    wanted = tl.where(wanted > LOWEST, wanted, LOWEST)
    if GROUPS != CHOSEN_GROUPS:
        wanted = within_groups(wanted, e, E, GROUPS, CHOSEN_GROUPS, TOP2, ROWS, G2)
    wanted = tl.where(inside, wanted, float("-inf"))
    choice, ids, weights = choices_of(scores, wanted, e, ROWS, E2, K, K2)
    weights = weights_of(weights, K, K2, SCORES, NORMALIZES, scale)
    j = tl.arange(0, K2)[None, :]
    is_choice = is_real[:, None] & (j < K)
    tl.store(chosen.weights + row[:, None] * K + j, weights, mask=is_choice)
    given = ((choice >= 0) & is_real[:, None]).to(tl.int32)
    count = tl.sum(given, axis=0)
    expert = tl.arange(0, E2)
    if into is None:
        tl.store(chosen.ids + row[:, None] * K + j, ids, mask=is_choice)
        tl.atomic_add(counters.counts + expert, count.to(tl.int64), mask=count > 0, sem="relaxed")
    else:
        first = tl.atomic_add(counters.own + expert, count, mask=count > 0, sem="relaxed")
        place = first[None, :] + tl.cumsum(given, axis=0) - given
        tl.store(into.pairs + e * T + place, row[:, None] * K + choice, mask=given != 0)
        if is_last_program(counters.own, E, tl.num_programs(0)):
            lay_out_tiles(into, counters, E, E2, BM)
