"""What stands between the model's logits and the number a kernel compares: masks, bias, penalties, temperature.

Kernels never write changed logits back: each that needs some reads the model's own and applies the same operations in
the same order, so that all see the same float32 bit for bit. That rests on launching without fused multiply-add and on
divisions that are rounded as IEEE says. `sampler_ops` makes the tuples, the stages' `operands` say what they hold.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Column(NamedTuple):
    """A strided column of the request table: entry i at at + i * (gap + 1).

    No number in a tuple may be 1: it would be made a constant, and Triton 3.6 loses those of tuples under an `if`. No
    field may be called `values` or `type`, which Triton's own tuples have already.
    """

    at: Any
    gap: Any


class Pool(NamedTuple):
    """Rows of a pool, or of any table: row `place` of it stands at at + place * step. place 0 is nobody's."""

    at: Any
    step: Any
    place: Column


class Grammar(NamedTuple):
    """Packed bits by logits row, id i in bit i mod 8 of byte i // 8. place [L]: row of the bits, -1 for a free row."""

    at: Any
    step: Any
    place: Any


class Bans(NamedTuple):
    """Ids [rows, width] forbidden while position < until; a negative id ends the row's list."""

    until: Column
    ids: Any
    step: Any
    width: Any


class Bias(NamedTuple):
    """num ids of a row, and the float32 numbers to add."""

    num: Column
    ids: Pool
    amounts: Pool


class Penalties(NamedTuple):
    """Three scalars a row; seen: int32 a token, its count in the output and `IN_PROMPT`."""

    repetition: Column
    frequency: Column
    presence: Column
    seen: Pool


class Features(NamedTuple):
    """Operations on the logits of a step, None for those it does not run."""

    grammar: Grammar | None = None
    allowed: Pool | None = None
    bans: Bans | None = None
    bias: Bias | None = None
    penalties: Penalties | None = None
    inverse: Column | None = None


class Rows(NamedTuple):
    """Logits rows: req_idx, position, seed int64 [L]."""

    req_idx: Any
    position: Any
    seed: Any


class Logits(NamedTuple):
    """[L, V] of the model, in bfloat16, float16 or float32; step: elements between rows."""

    at: Any
    step: Any
    vocab: Any


GROUP = 128
"""Ids of a group: `framework.sampling.groups.GROUP`, which is part of the draw's contract."""
IN_PROMPT = tl.constexpr(1 << 30)
"""Set in the number of a token that stands in the prompt: see the operation `penalties` of `interfaces.SamplerOps`."""
BEHIND = tl.constexpr(1 << 23)
"""The number of a group that lies behind every vocabulary; its ids still fit into int32."""


@triton.jit
def entry(column, row):
    return tl.load(column.at + row * (column.gap + 1))


@triton.jit
def place_of(pool, request):
    return entry(pool.place, request)


@triton.jit
def line(pool, place):
    """Pointer to the row `place` of a pool: int64, since a pool of counts may be larger than 2^31."""
    return pool.at + place.to(tl.int64) * pool.step


@triton.jit
def unpacked(line, group, vocab, GROUPS: tl.constexpr):
    """[GROUPS, 128] int32, 1 where the bit of the id is set. One byte stands for eight neighbours of a thread."""
    at = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    loaded = tl.load(line + at, mask=at * 8 < vocab, other=0).to(tl.int32)
    spread = (loaded[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(spread, (GROUPS, 128))


@triton.jit
def obeying(x, grammar, row, group, vocab, GROUPS: tl.constexpr):
    place = tl.load(grammar.place + row)
    if place >= 0:
        bits = unpacked(grammar.at + place.to(tl.int64) * grammar.step, group, vocab, GROUPS)
        x = tl.where(bits != 0, x, float("-inf"))
    return x


@triton.jit
def allowed_only(x, allowed, request, group, vocab, GROUPS: tl.constexpr):
    place = place_of(allowed, request)
    if place != 0:
        x = tl.where(unpacked(line(allowed, place), group, vocab, GROUPS) != 0, x, float("-inf"))
    return x


@triton.jit
def banned(x, bans, request, position, group, ids):
    if position < entry(bans.until, request):
        lowest = tl.min(group)
        highest = tl.max(group)
        at = bans.ids + request * bans.step
        place = tl.full((), 0, tl.int32)
        token = tl.load(at)
        while token >= 0:
            if (token // 128 >= lowest) & (token // 128 <= highest):
                x = tl.where(ids == token, float("-inf"), x)
            place += 1
            token = tl.load(at + place, mask=place < bans.width, other=-1)
    return x


@triton.jit
def biased(x, bias, request, group, ids):
    count = entry(bias.num, request)
    lowest = tl.min(group)
    highest = tl.max(group)
    tokens = line(bias.ids, place_of(bias.ids, request))
    amounts = line(bias.amounts, place_of(bias.amounts, request))
    place = tl.full((), 0, tl.int32)
    while place < count:
        token = tl.load(tokens + place)
        if (token // 128 >= lowest) & (token // 128 <= highest):
            x = tl.where(ids == token, x + tl.load(amounts + place), x)
        place += 1
    return x


@triton.jit
def penalised(x, penalties, request, ids, vocab):
    """l / r if l > 0 else l * r where a token was seen, then l - (frequency * count + presence) where it was drawn."""
    place = place_of(penalties.seen, request)
    if place != 0:
        repetition = entry(penalties.repetition, request)
        frequency = entry(penalties.frequency, request)
        presence = entry(penalties.presence, request)
        seen = tl.load(line(penalties.seen, place) + ids, mask=ids < vocab, other=0)
        count = (seen & (IN_PROMPT - 1)).to(tl.float32)
        scaled = tl.where(x > 0, tl.math.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(seen != 0, scaled, x)
        x = tl.where(count > 0, x - (count * frequency + presence), x)
    return x


@triton.jit
def processed(logits, rows, features, row, group, GROUPS: tl.constexpr):
    """[GROUPS, 128] float32 processed logits of groups of a row.

    group [GROUPS] int32: numbers of groups. What lies behind the vocabulary is -inf and is not read. A NaN becomes
    +inf: a maximum on a device passes over NaN, and a row with +inf is reported as faulty alike.
    """
    ids = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    is_read = ids < logits.vocab
    x = tl.load(logits.at + row.to(tl.int64) * logits.step + ids, mask=is_read, other=float("-inf")).to(tl.float32)
    request = tl.load(rows.req_idx + row)
    if features.grammar is not None:
        x = obeying(x, features.grammar, row, group, logits.vocab, GROUPS)
    if features.allowed is not None:
        x = allowed_only(x, features.allowed, request, group, logits.vocab, GROUPS)
    if features.bans is not None:
        x = banned(x, features.bans, request, tl.load(rows.position + row), group, ids)
    if features.bias is not None:
        x = biased(x, features.bias, request, group, ids)
    if features.penalties is not None:
        x = penalised(x, features.penalties, request, ids, logits.vocab)
    x = tl.where(x == x, x, float("inf"))
    if features.inverse is not None:
        x = x * entry(features.inverse, request)
    return x
