"""The experts of a few tokens, bound by reading weights: each pair of token and choice is a row by a matrix.

Tokens need not be sorted: two of them that chose one expert read its weight twice, and that is rare. The reference is
`framework.layers.experts`; blocks are chosen in `cuda_experts`. For dtypes of 16 bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment,no-redef,var-annotated"
# ruff: noqa: RUF005 - Triton knows the sum of tuples, not their unpacking

from __future__ import annotations

import triton
import triton.language as tl

from framework_backends.triton.experts_products import activated
from framework_backends.triton.experts_route import real_tokens
from framework_backends.triton.launches import let_next_begin, wait_for_previous
from framework_backends.triton.products import (
    high_of,
    low_of,
    over_columns,
    pairs_at,
    plus_product,
    rounded,
    weight_pairs,
)


@triton.jit
def biased(value, expert, row, is_row, y):
    """value [BN] + bias at rows of the weights of all experts, rounded to the dtype of y, float32."""
    if expert.bias is not None:
        value += tl.load(expert.bias + row, mask=is_row, other=0.0).to(tl.float32)
    return rounded(value, y)


@triton.jit(do_not_specialize=["T"])
def gated_rows_kernel(
    x, stride, expert, ids, y, num_tokens, T, limit, N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, IN_TURN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN outputs, T * CHOICES): y [pairs, N] of x [T, K], activated. Padding is left out.

    A row of a weight is cut into pieces of BK columns, eight neighbours to a thread; AHEAD pieces are on the way at a
    time.
    """
    let_next_begin(DEPENDENT)
    CUTS: tl.constexpr = (K + BK - 1) // BK
    EVEN_K: tl.constexpr = K % BK == 0
    EVEN_N: tl.constexpr = N % BN == 0
    dtype: tl.constexpr = expert.weight.dtype.element_ty
    pair = tl.program_id(1)
    token = pair // CHOICES
    out = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.arange(0, BK // 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    wait_for_previous(DEPENDENT)
    if token >= real_tokens(num_tokens, T):
        return
    begin = tl.load(ids + pair) * (2 * N)
    first = begin + tl.program_id(0) * BN
    gates = ()
    ups = ()
    for cut in tl.static_range(CUTS if CUTS < AHEAD else AHEAD):
        place = cut * (BK // 2)
        gates = gates + (weight_pairs(expert, first, place, begin + N, K, BN, BK, EVEN_N, EVEN_K),)
        ups = ups + (weight_pairs(expert, first + N, place, begin + 2 * N, K, BN, BK, EVEN_N, EVEN_K),)
    gate = tl.zeros((BK // 8, BN, 4), tl.float32)
    up = tl.zeros((BK // 8, BN, 4), tl.float32)
    row = x + token.to(tl.int64) * stride
    for cut in tl.static_range(CUTS):
        if cut + AHEAD < CUTS:
            place = (cut + AHEAD) * (BK // 2)
            gates = gates + (weight_pairs(expert, first, place, begin + N, K, BN, BK, EVEN_N, EVEN_K),)
            ups = ups + (weight_pairs(expert, first + N, place, begin + 2 * N, K, BN, BK, EVEN_N, EVEN_K),)
        values = pairs_at(row, cut * (BK // 2) + column, K, EVEN_K)
        low = low_of(values, dtype)
        high = high_of(values, dtype)
        gate = plus_product(gate, gates[cut], low, high, dtype, IN_TURN)
        up = plus_product(up, ups[cut], low, high, dtype, IN_TURN)
    opened = biased(over_columns(gate), expert, begin + out, out < N, y)
    value = activated(opened, biased(over_columns(up), expert, begin + N + out, out < N, y), limit)
    tl.store(y + pair.to(tl.int64) * N + out, value, mask=out < N)


@triton.jit(do_not_specialize=["T"])
def summed_rows_kernel(
    x, expert, ids, weights, other, y, num_tokens, T, N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, IN_TURN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN outputs, T): y [T, N], over a token's choices the sum of weight times product of x [pairs, K]
    by the expert, and of other [T, N] unless that is None; 0 for padding.

    The columns of all choices, one behind the other, are cut into pieces as in `gated_rows_kernel`, and added up as
    those of one long row.
    """
    let_next_begin(DEPENDENT)
    CUTS: tl.constexpr = (K + BK - 1) // BK
    EVEN_K: tl.constexpr = K % BK == 0
    EVEN_N: tl.constexpr = N % BN == 0
    dtype: tl.constexpr = expert.weight.dtype.element_ty
    token = tl.program_id(1)
    out = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.arange(0, BK // 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    into = y + token.to(tl.int64) * N + out
    wait_for_previous(DEPENDENT)
    if token >= real_tokens(num_tokens, T):
        tl.store(into, tl.zeros((BN,), y.dtype.element_ty), mask=out < N)
        return
    begins = ()
    factors = ()
    for choice in tl.static_range(CHOICES):
        begins = begins + (tl.load(ids + token * CHOICES + choice) * N,)
        factors = factors + (tl.load(weights + token * CHOICES + choice),)
    pieces = ()
    for cut in tl.static_range(CHOICES * CUTS if CHOICES * CUTS < AHEAD else AHEAD):
        begin = begins[cut // CUTS]
        place = (cut % CUTS) * (BK // 2)
        first = begin + tl.program_id(0) * BN
        pieces = pieces + (weight_pairs(expert, first, place, begin + N, K, BN, BK, EVEN_N, EVEN_K),)
    total = tl.zeros((BK // 8, BN, 4), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for choice in tl.static_range(CHOICES):
        for cut in tl.static_range(CUTS):
            if choice * CUTS + cut + AHEAD < CHOICES * CUTS:
                begin = begins[(choice * CUTS + cut + AHEAD) // CUTS]
                place = ((cut + AHEAD) % CUTS) * (BK // 2)
                first = begin + tl.program_id(0) * BN
                pieces = pieces + (weight_pairs(expert, first, place, begin + N, K, BN, BK, EVEN_N, EVEN_K),)
            row = x + (token * CHOICES + choice).to(tl.int64) * K
            values = pairs_at(row, cut * (BK // 2) + column, K, EVEN_K)
            low = low_of(values, dtype) * factors[choice]
            high = high_of(values, dtype) * factors[choice]
            total = plus_product(total, pieces[choice * CUTS + cut], low, high, dtype, IN_TURN)
        if expert.bias is not None:
            added = tl.load(expert.bias + begins[choice] + out, mask=out < N, other=0.0)
            bias += added.to(tl.float32) * factors[choice]
    if other is not None:
        bias += tl.load(other + token.to(tl.int64) * N + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(into, over_columns(total) + bias, mask=out < N)
