"""Staged writes of the request table in one launch each: `apply_rows` and `apply_spans` of a backend's `StepOps`.

The reference is `framework.step_ops`; a backend takes these two from here and the rest from wherever it likes.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def rows_kernel(table, rows, staged, width, BLOCK: tl.constexpr):
    """Grid (blocks of the width, n): table[rows[i]] = staged[i], bytes."""
    place = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    content = tl.load(staged + place.to(tl.int64) * width + at, mask=at < width)
    tl.store(table + tl.load(rows + place).to(tl.int64) * width + at, content, mask=at < width)


@triton.jit
def spans_kernel(flat, spans, staged, BLOCK: tl.constexpr):
    """Grid (blocks of the longest span, n). spans [n, 3] int64: first place in flat, first and last + 1 in staged."""
    span = spans + tl.program_id(1) * 3
    first = tl.load(span + 1)
    at = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < tl.load(span + 2)
    tl.store(flat + tl.load(span) + (at - first), tl.load(staged + at, mask=is_in), mask=is_in)


def apply_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """As `step_ops.apply_rows`; rows are all different, as staged ones are."""
    width = table.shape[1]
    if len(rows):
        rows_kernel[(triton.cdiv(width, BLOCK), len(rows))](table, rows, values.contiguous(), width, BLOCK=BLOCK)


def apply_spans(flat: Tensor, starts: Sequence[int], counts: Sequence[int], values: Tensor) -> None:
    """As `step_ops.apply_spans`; spans do not overlap, as staged ones do not. Does not wait for the device."""
    if not any(counts):
        return
    ends = list(accumulate(counts))
    spans = [(start, end - count, end) for start, count, end in zip(starts, counts, ends, strict=True)]
    on_device = torch.tensor(spans, dtype=torch.int64).to(flat.device, non_blocking=True)
    spans_kernel[(triton.cdiv(max(counts), BLOCK), len(spans))](flat, on_device, values, BLOCK=BLOCK)
