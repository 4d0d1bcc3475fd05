"""Torch reference of the array functions that surround a forward pass: staged writes, preparation, post-update.

A backend offers functions of these names and meanings as its `step_ops`; this module itself serves on any device.
Nothing here waits for a device: every size comes from the host, every index from a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from framework.batch import NULL_BLOCK, NULL_ROW

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import Column


@dataclass(frozen=True, slots=True)
class TableViews:
    """The request table's device columns that a step reads and writes; row = req_idx, row 0 belongs to nobody.

    token_ids            [rows, max_model_len] int32, known tokens of each request, drawn ones included
    num_tokens           [rows] int32 known tokens; the next drawn token is written here
    num_computed_tokens  [rows] int32 tokens whose KV is written
    seed                 [rows] int64 bits of the request's seed
    block_table          per KV group [rows, max_blocks] int32 physical blocks
    """

    token_ids: Tensor
    num_tokens: Column
    num_computed_tokens: Column
    seed: Column
    block_table: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Fixed device memory that `prepare` reads its step from and fills; sized for the largest step.

    In, copied from the host once a step, all int64: rows [R], num_scheduled [R], query_start_loc [R + 1], logits_rows
    [L] (batch row of each logits row); of a padded step of decodes rows and new_blocks [groups, R] alone, the block
    that each row enters with the step, NULL_BLOCK for a row that stays in the one it has. Out: the tensors of
    `InputBatch`, at full length; the step uses the first T, R or L entries. arange [max tokens] int64 is constant.
    lanes [3 + groups, n] int64: positions, seq_lens, draw_positions and each slot_mapping are its rows, so that one
    operation moves all of them.
    """

    rows: Tensor
    new_blocks: Tensor
    num_scheduled: Tensor
    query_start_loc: Tensor
    logits_rows: Tensor
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    logits_indices: Tensor
    expanded_idx_mapping: Tensor
    draw_positions: Tensor
    seeds: Tensor
    slot_mapping: tuple[Tensor, ...]
    lanes: Tensor
    arange: Tensor
    block_sizes: tuple[int, ...]


def apply_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Overwrites whole rows of a packed table. table [rows, bytes] uint8, rows [n] int64, values [n, bytes] uint8."""
    table.index_copy_(0, rows, values)


def apply_spans(flat: Tensor, starts: Sequence[int], counts: Sequence[int], values: Tensor) -> None:
    """Writes ragged spans: values holds counts[i] entries for flat[starts[i] :], span after span.

    flat [n] int32 a table seen as one row, values [sum(counts)] int32.
    """
    offset = 0
    for start, count in zip(starts, counts, strict=True):
        flat[start : start + count] = values[offset : offset + count]
        offset += count


def prepare(
    buffers: StepBuffers, table: TableViews, num_rows: int, num_tokens: int, num_logits: int, goes_on: bool = False
) -> None:
    """Fills the step's input tensors from the request table: ids, positions, lengths, slots, logits rows.

    goes_on  as in `SchedulerOutput`: a backend may move the last step's tensors on, with the same result; here it is
             only a promise that is not needed
    A row's span starts at its num_computed_tokens on the device, which is right also when the host has not yet seen
    the tokens of a step in flight.
    """
    b = buffers
    rows, scheduled = b.rows[:num_rows], b.num_scheduled[:num_rows]
    first = b.query_start_loc[:num_rows]
    computed = table.num_computed_tokens.dev[rows].long()
    torch.add(computed, scheduled, out=b.seq_lens[:num_rows])
    positions = b.positions[:num_tokens]
    if num_tokens == num_rows:  # one token a row: no row has to be found for a token
        token_rows = rows
        positions.copy_(computed)
    else:
        token_batch = torch.repeat_interleave(b.arange[:num_rows], scheduled, output_size=num_tokens)
        token_rows = rows[token_batch]
        torch.add((computed - first)[token_batch], b.arange[:num_tokens], out=positions)
    torch.take(table.token_ids, token_rows * table.token_ids.shape[1] + positions, out=b.input_ids[:num_tokens])
    for blocks, slots, size in zip(table.block_table, b.slot_mapping, b.block_sizes, strict=True):
        block = torch.take(blocks, token_rows * blocks.shape[1] + positions // size)
        torch.add(block * size, positions % size, out=slots[:num_tokens])
    _prepare_logits(b, table, num_logits)


def _prepare_logits(b: StepBuffers, table: TableViews, num_logits: int) -> None:
    """Which hidden states give logits, whose they are, and which token of its sequence each of them draws."""
    batch_rows = b.logits_rows[:num_logits]
    req_idx = b.expanded_idx_mapping[:num_logits]
    torch.index_select(b.rows, 0, batch_rows, out=req_idx)
    torch.sub(b.query_start_loc[batch_rows + 1], 1, out=b.logits_indices[:num_logits])
    torch.index_select(b.seq_lens, 0, batch_rows, out=b.draw_positions[:num_logits])
    torch.take(table.seed.dev, req_idx, out=b.seeds[:num_logits])


def prepare_ragged(buffers: StepBuffers, table: TableViews, num_rows: int, num_tokens: int, num_logits: int) -> None:
    """As `prepare` for a step that is padded to as many rows, tokens and logits rows. Rows of NULL_ROW without tokens
    stand behind those that run: their length is 0. A token behind the last row's is padding: token i of it has position
    0 and writes slot i mod block_size of the null block. What logits rows of padding get is not read.
    """
    b = buffers
    rows, starts, token = b.rows[:num_rows], b.query_start_loc[: num_rows + 1], b.arange[:num_tokens]
    computed = table.num_computed_tokens.dev[rows].long().masked_fill_(rows == NULL_ROW, 0)
    b.seq_lens[:num_rows] = computed + b.num_scheduled[:num_rows]
    is_padding = token >= starts[num_rows]
    batch_row = torch.searchsorted(starts[:num_rows], token, right=True) - 1
    token_rows = rows[batch_row].masked_fill(is_padding, NULL_ROW)
    positions = ((computed - starts[:num_rows])[batch_row] + token).masked_fill_(is_padding, 0)
    b.positions[:num_tokens] = positions
    b.input_ids[:num_tokens] = table.token_ids[token_rows, positions]
    for blocks, slots, size in zip(table.block_table, b.slot_mapping, b.block_sizes, strict=True):
        offset = torch.where(is_padding, token, positions) % size
        slots[:num_tokens] = blocks[token_rows, positions // size].long() * size + offset
    _prepare_logits(b, table, num_logits)
    b.logits_indices[:num_logits].clamp_(min=0)


def prepare_decodes(buffers: StepBuffers, table: TableViews, num_rows: int) -> None:
    """As `prepare` for a step in which each of num_rows rows computes and draws one token, after the block that it
    enters is in its block table. A row of NULL_ROW is padding: length and position 0, and row i of it writes slot i mod
    block_size of the null block. Everything is read from the device, so that the call can be captured.
    """
    b = buffers
    rows = b.rows[:num_rows]
    is_padding = rows == NULL_ROW
    computed = table.num_computed_tokens.dev[rows].long().masked_fill_(is_padding, 0)
    b.positions[:num_rows] = computed
    b.seq_lens[:num_rows] = (computed + 1).masked_fill_(is_padding, 0)
    b.input_ids[:num_rows] = table.token_ids[rows, computed]
    groups = zip(table.block_table, b.new_blocks, b.slot_mapping, b.block_sizes, strict=True)
    for blocks, new_blocks, slots, size in groups:
        column, new = computed // size, new_blocks[:num_rows].int()
        block = torch.where(new == NULL_BLOCK, blocks[rows, column], new)
        blocks[rows, column] = block.masked_fill(is_padding, NULL_BLOCK)
        offset = torch.where(is_padding, b.arange[:num_rows], computed) % size
        slots[:num_rows] = block.long().masked_fill_(is_padding, NULL_BLOCK) * size + offset
    b.logits_indices[:num_rows] = b.arange[:num_rows]
    b.expanded_idx_mapping[:num_rows] = rows
    b.draw_positions[:num_rows] = b.seq_lens[:num_rows]
    b.seeds[:num_rows] = table.seed.dev[rows]


def receive(told: Tensor, ring: Tensor, turn: Tensor, num_rows: int) -> None:
    """Brings what the host has told a step: the first num_rows of each line of told [lines, rows] are those of piece
    turn [1] of ring [pieces, lines, rows], all int64, and turn moves on to the next piece, or from the last one to the
    first. The ring is `Backend.host_memory`.

    A backend may do without it; the host copies a piece before each step then.
    """
    told[:, :num_rows] = ring[int(turn), :, :num_rows]
    turn.copy_((turn + 1) % len(ring))


def post_update(buffers: StepBuffers, table: TableViews, num_rows: int, num_logits: int, sampled: Tensor) -> None:
    """Commits on the device the step that was prepared last: advances lengths, appends the drawn tokens.

    sampled [L] int64, one a logits row. A backend may keep what `prepare` worked out; nothing else is prepared between.
    Padding rows leave the table as it is, but for the first token id of the null row, which nobody reads.
    """
    rows = buffers.rows[:num_rows]
    table.num_computed_tokens.dev[rows] = buffers.seq_lens[:num_rows].int()
    if num_logits:
        req_idx, position = buffers.expanded_idx_mapping[:num_logits], buffers.draw_positions[:num_logits]
        # A request that ends by length may draw a token at max_model_len only when nothing reads it: keep it inside.
        place = position.clamp(max=table.token_ids.shape[1] - 1)
        table.token_ids[req_idx, place] = sampled.int()
        table.num_tokens.dev[req_idx] = (position.int() + 1).masked_fill_(req_idx == NULL_ROW, 0)
