"""Block formats of GGUF tensors and how each becomes floating point, bit-equal in float32 to the reference package.

A block is a fixed number of bytes that holds a fixed number of values. Nothing here knows files, names or models. The
layout of each format is drawn in its function; source: ggml's block structures.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

# Below torch's own threshold for splitting an operation over threads (32,768 elements): a chunk stays in cache and on
# the thread that reads it, whatever the process's thread settings are.
CHUNK_VALUES = 32_000


@dataclass(frozen=True)
class BlockFormat:
    """decode(blocks [n, block_bytes] uint8, out [n, values] float32) fills `out`."""

    name: str
    values: int
    block_bytes: int
    decode: Callable[[Tensor, Tensor], None]

    def num_bytes(self, num_values: int) -> int:
        return num_values // self.values * self.block_bytes


def dequantize(raw: Tensor, format: BlockFormat, out: Tensor, pool: Executor) -> None:
    """Fills `out` (any shape, contiguous, any float dtype) from raw [num_bytes] uint8, chunk by chunk on the pool."""
    blocks = raw.view(-1, format.block_bytes)
    flat = out.view(-1, format.values)
    step = max(1, CHUNK_VALUES // format.values)
    half = -(-len(blocks) // (2 * step)) * step
    spans = [(low, min(low + half, len(blocks))) for low in range(0, len(blocks), half)]
    jobs = [pool.submit(_dequantize_span, blocks, format, flat, low, high, step) for low, high in spans]
    for job in jobs:
        job.result()


def _dequantize_span(blocks: Tensor, format: BlockFormat, flat: Tensor, low: int, high: int, step: int) -> None:
    scratch = torch.empty(min(step, high - low), format.values)
    for start in range(low, high, step):
        stop = min(start + step, high)
        if flat.dtype == torch.float32:
            format.decode(blocks[start:stop], flat[start:stop])
            continue
        wide = scratch[: stop - start]
        format.decode(blocks[start:stop], wide)
        flat[start:stop].copy_(wide)


def _half(blocks: Tensor, start: int) -> Tensor:
    """[n, 1] float32 of the float16 at byte `start` of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles of packed [n, b] to the first half of out [n, 2 b], high nibbles to the second."""
    width = packed.shape[1]
    out[:, :width].copy_(packed & 15)
    out[:, width:].copy_(packed >> 4)


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.bfloat16))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """d float16 | 32 int8: d * q."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """d float16 | 16 bytes of nibbles: d * (q - 8)."""
    _nibbles(blocks[:, 2:], out)
    out.sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """d float16 | m float16 | 16 bytes of nibbles: d * q + m, rounded after the product and after the sum."""
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """d | dmin (float16) | 12 bytes of eight 6-bit scales and eight 6-bit minima | 128 bytes of nibbles.

    Sub-block j of 32 values: (d * scale_j) * q - dmin * min_j. Nibble bytes come in four runs of 32, whose low nibbles
    are sub-block 2 r and whose high ones 2 r + 1.
    """
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, (both & 15) | ((first >> 2) & 48)), dim=1).float() * _half(blocks, 0)
    minimum = torch.cat((second & 63, (both >> 4) | ((second >> 2) & 48)), dim=1).float() * _half(blocks, 2)
    packed, values = blocks[:, 16:].unflatten(1, (4, 32)), out.view(-1, 4, 2, 32)
    values[:, :, 0].copy_(packed & 15)
    values[:, :, 1].copy_(packed >> 4)
    out.view(-1, 8, 32).mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of low nibbles | 64 bytes of high bit pairs | 16 int8 scales | d float16.

    Each half of 128 values takes 64 low and 32 high bytes: value 32 g + i of it has its four low bits in byte
    (g mod 2) * 32 + i (low nibble for g < 2) and its two high bits at 2 g of byte i. (d * scale of its 16) * (q - 32).
    """
    low, high = blocks[:, :128].unflatten(1, (2, 64)), blocks[:, 128:192].unflatten(1, (2, 32))
    values = out.view(-1, 2, 4, 32)
    for g in range(4):
        nibble = low[:, :, (g % 2) * 32 : (g % 2) * 32 + 32]
        nibble = (nibble & 15) if g < 2 else (nibble >> 4)
        values[:, :, g].copy_(nibble | (((high >> (2 * g)) & 3) << 4))
    scale = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    out.sub_(32.0).view(-1, 16, 16).mul_(scale.unsqueeze(2))


# type number of the file -> format
FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
# Formats that exist and are not read, so that a refusal can name them.
OTHER_FORMATS: dict[int, str] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
