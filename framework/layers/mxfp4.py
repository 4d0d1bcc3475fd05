"""MXFP4 matrices as checkpoints store them, turned into the model's dtype when they are read. No product is here.

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3 (blocks of 32), 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.interfaces import ModelContext

BLOCK = 32
"""Values of a row that share a scale."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255  # of E8M0


def take_mxfp4(ctx: ModelContext, name: str, shape: Sequence[int]) -> Tensor:
    """[..., rows, columns] out of the tensors `name_blocks` and `name_scales`, in the model's dtype.

    Raises CheckpointError when one of them is missing or of another shape.
    """
    *rows, columns = shape
    groups = -(-columns // BLOCK)
    blocks = ctx.weights.take(f"{name}_blocks", (*rows, groups, BLOCK // 2), torch.uint8)
    scales = ctx.weights.take(f"{name}_scales", (*rows, groups), torch.uint8)
    out = torch.empty((*rows, groups * BLOCK), dtype=ctx.dtype, device=blocks.device)
    # one at a time: float32 takes eight times the room
    for part, block, scale in zip(out, blocks, scales, strict=True):
        part.copy_(dequantize(block, scale))
    return out[..., :columns]


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., G, 16] and scales [..., G], both uint8 -> [..., 32 G] float32, exactly.

    The low half of a byte comes first. A value is (-1)^sign * its E2M1 magnitude * 2^(scale - 127); a scale of 255
    makes its whole block NaN.
    """
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    values = torch.ldexp(table[halves], scales.int().unsqueeze(-1) - _BIAS)
    return values.masked_fill((scales == _NAN).unsqueeze(-1), torch.nan).flatten(-2)
