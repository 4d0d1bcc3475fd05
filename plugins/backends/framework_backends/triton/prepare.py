"""Preparation of a step in one launch: ids, positions, lengths, slots and logits rows, from the request table.

The references are `step_ops.prepare` and `step_ops.prepare_decodes`; `cuda_step_ops` calls in. Every index of the grid
is a token, a batch row and a logits row at once, and nothing that one program writes is read by another.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    from framework.step_ops import StepBuffers, TableViews

BLOCK, NUM_WARPS = 128, 4
DECODE_BLOCK, DECODE_WARPS = 32, 1
"""A row of a decode is a chain of three loads: what counts is how many are on their way at a time."""


class Told(NamedTuple):
    """What the host sent, as in `StepBuffers`, all int64; new_blocks None but for a padded step of decodes."""

    rows: Any
    num_scheduled: Any
    query_start_loc: Any
    logits_rows: Any
    new_blocks: Any


class Filled(NamedTuple):
    """The step's tensors, as in `StepBuffers`: int64, input_ids int32. slots: one a KV group."""

    input_ids: Any
    positions: Any
    seq_lens: Any
    logits_indices: Any
    req_idx: Any
    draw_positions: Any
    seeds: Any
    slots: Any


class Table(NamedTuple):
    """The request table: token_ids and, a KV group, block_table int32, contiguous; columns that are strided."""

    token_ids: Any
    num_computed: Any
    seed: Any
    block_table: Any


@triton.jit
def rows_of(query_start_loc, token, num_rows, STEPS: tl.constexpr):
    """Batch row of each token: the last one that starts at or before it. num_rows at most 2 ** STEPS."""
    row = tl.zeros_like(token)
    for step in tl.static_range(STEPS):
        next_row = row + (1 << (STEPS - 1 - step))
        start = tl.load(query_start_loc + next_row, mask=next_row < num_rows, other=0)
        row = tl.where((next_row < num_rows) & (start <= token), next_row, row)
    return row


@triton.jit
def entry_of(block_table, request, position, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Pointer to the block-table entry of positions."""
    return block_table + request * WIDTH + position // SIZE


@triton.jit
def slot_of(block, position, SIZE: tl.constexpr):
    return block.to(tl.int64) * SIZE + position % SIZE


@triton.jit
def fill_tokens(
    told, filled, table, token, num_rows, num_tokens, max_len, computed_step,
    SIZES: tl.constexpr, WIDTHS: tl.constexpr, ONE_EACH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Ids, positions and slots of tokens. Tokens behind the last row's, and those of request 0, are padding: the first
    id of request 0 at position 0, each in a slot of block 0."""
    is_in = token < num_tokens
    row = token
    start = token.to(tl.int64)
    is_real = is_in
    if not ONE_EACH:
        row = rows_of(told.query_start_loc, token, num_rows, STEPS)
        start = tl.load(told.query_start_loc + row, mask=is_in, other=0)
        is_real = is_in & (token < tl.load(told.query_start_loc + row + 1, mask=is_in, other=0))
    request = tl.load(told.rows + row, mask=is_real, other=0)
    is_real = is_real & (request != 0)
    computed = tl.load(table.num_computed + request * computed_step, mask=is_real, other=0)
    position = tl.where(is_real, computed + token - start, 0)
    tl.store(filled.positions + token, position, mask=is_in)
    ids = tl.load(table.token_ids + request * max_len + position, mask=is_in, other=0)
    tl.store(filled.input_ids + token, ids, mask=is_in)
    place = tl.where(is_real, position, token.to(tl.int64))
    for group in tl.static_range(len(SIZES)):
        at = entry_of(table.block_table[group], request, position, SIZES[group], WIDTHS[group])
        block = tl.load(at, mask=is_real, other=0)
        tl.store(filled.slots[group] + token, slot_of(block, place, SIZES[group]), mask=is_in)


@triton.jit
def length_of(told, table, row, is_in, computed_step):
    """(request, readable context after this step) of batch rows, int64. Request 0 has computed nothing."""
    request = tl.load(told.rows + row, mask=is_in, other=0)
    computed = tl.load(table.num_computed + request * computed_step, mask=is_in & (request != 0), other=0)
    return request, tl.load(told.num_scheduled + row, mask=is_in, other=0) + computed


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_logits"])
def prepare_kernel(
    told, filled, table, num_rows, num_tokens, num_logits, max_len, computed_step, seed_step,
    SIZES: tl.constexpr, WIDTHS: tl.constexpr, ONE_EACH: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of the most of tokens, rows and logits rows). SIZES: tokens of a block, WIDTHS: blocks of a row."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fill_tokens(
        told, filled, table, index, num_rows, num_tokens, max_len, computed_step, SIZES, WIDTHS, ONE_EACH, STEPS
    )
    is_row = index < num_rows
    _, length = length_of(told, table, index, is_row, computed_step)
    tl.store(filled.seq_lens + index, length, mask=is_row)
    is_drawn = index < num_logits
    row = tl.load(told.logits_rows + index, mask=is_drawn, other=0)
    request, length = length_of(told, table, row, is_drawn, computed_step)
    tl.store(filled.req_idx + index, request, mask=is_drawn)
    tl.store(filled.draw_positions + index, length, mask=is_drawn)
    end = tl.load(told.query_start_loc + row + 1, mask=is_drawn, other=0)
    tl.store(filled.logits_indices + index, tl.maximum(end - 1, 0), mask=is_drawn)
    tl.store(filled.seeds + index, tl.load(table.seed + request * seed_step, mask=is_drawn, other=0), mask=is_drawn)


@triton.jit(do_not_specialize=["num_rows"])
def decodes_kernel(
    told, filled, table, num_rows, max_len, computed_step, seed_step, new_blocks_step,
    SIZES: tl.constexpr, WIDTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows): token, batch row and logits row are one. Request 0 is padding, block 0 is none."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = row < num_rows
    request = tl.load(told.rows + row, mask=is_in, other=0)
    is_real = request != 0
    computed = tl.load(table.num_computed + request * computed_step, mask=is_real, other=0).to(tl.int64)
    length = tl.where(is_real, computed + 1, 0)
    tl.store(filled.positions + row, computed, mask=is_in)
    tl.store(filled.seq_lens + row, length, mask=is_in)
    tl.store(filled.draw_positions + row, length, mask=is_in)
    tl.store(filled.req_idx + row, request, mask=is_in)
    tl.store(filled.logits_indices + row, row.to(tl.int64), mask=is_in)
    tl.store(filled.input_ids + row, tl.load(table.token_ids + request * max_len + computed, mask=is_in), mask=is_in)
    tl.store(filled.seeds + row, tl.load(table.seed + request * seed_step, mask=is_in), mask=is_in)
    place = tl.where(is_real, computed, row.to(tl.int64))
    for group in tl.static_range(len(SIZES)):
        at = entry_of(table.block_table[group], request, computed, SIZES[group], WIDTHS[group])
        new = tl.load(told.new_blocks + group * new_blocks_step + row, mask=is_real, other=0)
        tl.store(at, new.to(tl.int32), mask=is_real & (new != 0))
        block = tl.where(new != 0, new, tl.load(at, mask=is_real & (new == 0), other=0))
        tl.store(filled.slots[group] + row, slot_of(block, place, SIZES[group]), mask=is_in)


class Prepare:
    """Both launches over the memory of one engine: the tuples of tensors are made once."""

    def __init__(self, buffers: StepBuffers, table: TableViews) -> None:
        b, t = buffers, table
        self._told = Told(b.rows, b.num_scheduled, b.query_start_loc, b.logits_rows, b.new_blocks)
        self._filled = Filled(
            b.input_ids, b.positions, b.seq_lens, b.logits_indices, b.expanded_idx_mapping, b.draw_positions, b.seeds,
            b.slot_mapping,
        )  # fmt: skip
        computed, seed = t.num_computed_tokens.dev, t.seed.dev
        self._table = Table(t.token_ids, computed, seed, t.block_table)
        self._steps = t.token_ids.shape[1], computed.stride(0), seed.stride(0)
        self._sizes, self._widths = b.block_sizes, tuple(blocks.shape[1] for blocks in t.block_table)
        self._new_blocks_step = b.new_blocks.stride(0)
        self._search_steps = (len(b.rows) - 1).bit_length()

    def any_step(self, num_rows: int, num_tokens: int, num_logits: int) -> None:
        """As `step_ops.prepare` and `step_ops.prepare_ragged`. With as many tokens as rows each row has one: a step for
        any split has another number of them."""
        grid = (triton.cdiv(max(num_rows, num_tokens, num_logits), BLOCK),)
        prepare_kernel[grid](
            self._told, self._filled, self._table, num_rows, num_tokens, num_logits, *self._steps,
            SIZES=self._sizes, WIDTHS=self._widths, ONE_EACH=num_rows == num_tokens, STEPS=self._search_steps,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip

    def decodes(self, num_rows: int) -> None:
        """As `step_ops.prepare_decodes`."""
        decodes_kernel[(triton.cdiv(num_rows, DECODE_BLOCK),)](
            self._told, self._filled, self._table, num_rows, *self._steps, self._new_blocks_step,
            SIZES=self._sizes, WIDTHS=self._widths, BLOCK=DECODE_BLOCK, num_warps=DECODE_WARPS,
        )  # fmt: skip
