"""In-place operations written out in one launch, for a stage that is not fused and stands behind them.

The reference is the `apply` of the stages that name the operations, one after the other.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from framework_backends.triton.features import processed


@triton.jit
def apply_kernel(logits, rows, features, out, GROUPS: tl.constexpr):
    """Grid (blocks of GROUPS groups, L): out [L, V] float32 processed logits."""
    row = tl.program_id(1)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    x = processed(logits, rows, features, row, group, GROUPS)
    ids = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + row.to(tl.int64) * logits.vocab + ids, x, mask=ids < logits.vocab)
