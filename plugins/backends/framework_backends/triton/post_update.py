"""The end of a step in one launch: lengths advance and the drawn tokens are appended to the request table.

The reference is `step_ops.post_update`; `cuda_step_ops` calls in. Padding rows leave the table as it is.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from framework.step_ops import StepBuffers, TableViews

BLOCK, NUM_WARPS = 32, 1


class Prepared(NamedTuple):
    """What `prepare` has filled: rows and seq_lens of batch rows, req_idx and draw_positions of logits rows, int64."""

    rows: Any
    seq_lens: Any
    req_idx: Any
    draw_positions: Any


class Known(NamedTuple):
    """Columns of the request table that the step changes, int32: token_ids contiguous, the others strided."""

    token_ids: Any
    num_tokens: Any
    num_computed: Any


@triton.jit(do_not_specialize=["num_rows", "num_logits"], do_not_specialize_on_alignment=["sampled"])
def post_update_kernel(
    prepared, known, sampled, num_rows, num_logits, max_len, num_tokens_step, computed_step, BLOCK: tl.constexpr
):
    """Grid (blocks of rows): logits rows are no more than those. sampled [num_logits] int64."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(prepared.rows + row, mask=row < num_rows, other=0)
    length = tl.load(prepared.seq_lens + row, mask=row < num_rows, other=0)
    tl.store(known.num_computed + request * computed_step, length.to(tl.int32), mask=request != 0)
    is_drawn = row < num_logits
    request = tl.load(prepared.req_idx + row, mask=is_drawn, other=0)
    position = tl.load(prepared.draw_positions + row, mask=is_drawn, other=0)
    token = tl.load(sampled + row, mask=is_drawn, other=0).to(tl.int32)
    place = request * max_len + tl.minimum(position, max_len - 1)
    tl.store(known.token_ids + place, token, mask=request != 0)
    tl.store(known.num_tokens + request * num_tokens_step, (position + 1).to(tl.int32), mask=request != 0)


class PostUpdate:
    """The launch over the memory of one engine: the tuples of tensors are made once."""

    def __init__(self, buffers: StepBuffers, table: TableViews) -> None:
        b, num_tokens, num_computed = buffers, table.num_tokens.dev, table.num_computed_tokens.dev
        self._prepared = Prepared(b.rows, b.seq_lens, b.expanded_idx_mapping, b.draw_positions)
        self._known = Known(table.token_ids, num_tokens, num_computed)
        self._steps = table.token_ids.shape[1], num_tokens.stride(0), num_computed.stride(0)

    def __call__(self, num_rows: int, num_logits: int, sampled: Tensor) -> None:
        """As `step_ops.post_update`, whose rows are all different but for padding."""
        assert num_logits <= num_rows and sampled.is_contiguous(), (num_logits, num_rows, sampled.stride())
        post_update_kernel[(triton.cdiv(num_rows, BLOCK),)](
            self._prepared, self._known, sampled, num_rows, num_logits, *self._steps, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
