"""Keyed random numbers: a pure function of (seed, position, stream, level, id), equal on every device.

A written contract, frozen by known-answer vectors: a counter hash of 32 full bits over murmur3's finaliser. Every
function works alike on Python ints, numpy int64 arrays and torch int64 tensors (low 32 bits of a wrapped product are
exact), so importing this module imports no torch. What is drawn with the numbers is `framework.sampling.draw`.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar, cast
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

TARGET, DRAFT, ACCEPTANCE, RECOVERY = 0, 1, 2, 3
"""Streams of the engine: the target's draw (drafters use it too); under rejection a draft, its test, the recovery."""
FIRST_STAGE_STREAM = 16
"""Streams from here on belong to sampler stages, see `stage_stream`."""

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
KEY_STARTS = (0x243F6A88, 0x85A308D3)  # the first fraction words of pi
KEY_STEP = 0x9E3779B9
ID_FACTOR = 0x9E3779B1
SEED_STEP = 0x9E3779B97F4A7C15

Ints = TypeVar("Ints", int, "NDArray[Any]", "Tensor")


def fmix32(h: Ints) -> Ints:
    """murmur3's 32-bit finaliser of values in 0 .. 2^32 - 1: a bijection that lets every bit reach every bit."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)


def _absorb(h: Any, word: Any) -> Any:
    return (fmix32(h ^ word) + KEY_STEP) & MASK32


def row_key(seed: Ints, position: Ints, stream: int, level: int) -> tuple[Ints, Ints]:
    """Two 32-bit words that key one draw of one row.

    seed      64-bit seed; only its bits count, so -1 and 2^64 - 1 are one seed (arrays: int64 bits)
    position  index, in prompt + output, of the token that is drawn
    level     0 or 1: which draw of a two-level draw
    """
    words = (seed & MASK32, (seed >> 32) & MASK32, position & MASK32, stream * 2 + level)
    first, second = KEY_STARTS
    return reduce(_absorb, words, cast(Any, first)), reduce(_absorb, words, cast(Any, second))


def row_keys(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Keys of both levels at once: [2 levels, 2 words, L] int64, equal to `row_key`, in few small operations."""
    import torch

    low = seed & MASK32
    h = torch.stack([low ^ start for start in KEY_STARTS])
    h = (fmix32(h) + KEY_STEP) & MASK32
    h = _absorb(_absorb(h, (seed >> 32) & MASK32), position & MASK32)
    h = torch.stack((h ^ (stream * 2), h ^ (stream * 2 + 1)))
    return (fmix32(h) + KEY_STEP) & MASK32


def row_keys_np(seed: NDArray[np.int64], position: NDArray[np.int64], stream: int) -> NDArray[np.uint32]:
    """`row_keys` in numpy: arrays of 32-bit words wrap by themselves, which every function here may be given."""
    h: Any = np.array(KEY_STARTS, np.uint32)[:, None]
    for word in (seed, seed >> 32, position):
        h = _absorb(h, word.astype(np.uint32))
    keys: NDArray[np.uint32] = _absorb(h, np.array([stream * 2, stream * 2 + 1], np.uint32)[:, None, None])
    return keys


def random_bits(key: tuple[Ints, Ints], ids: Ints) -> Ints:
    """32 random bits for each id under a row's key; shapes broadcast."""
    first, second = key
    return fmix32(fmix32(((ids * ID_FACTOR) & MASK32) ^ first) ^ second)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of 32 random bits: -log(-log1p(-u)), u = (bits + 0.5) / 2^32.

    The winning tail is at u -> 0, where float64 holds all 32 bits; the largest value is 22.9. A form in float32 that
    lets u round to 1 cuts the tail off and never draws the unlikely tokens of a large vocabulary.
    """
    u = bits.double().add_(0.5).mul_(2.0**-32)
    return u.neg_().log1p_().neg_().log_().neg_().float()


def gumbel_np(bits: NDArray[np.integer[Any]] | int) -> NDArray[np.float32]:
    """`gumbel` in numpy: the reference for other devices."""
    u = (np.asarray(bits, dtype=np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float32] = (-np.log(-np.log1p(-u))).astype(np.float32)
    return noise


def stage_stream(key: str) -> int:
    """Stream of the sampler stage that stands under `key` in a pipeline, so that two of one class draw apart."""
    return FIRST_STAGE_STREAM + crc32(key.encode()) % (2**31 - FIRST_STAGE_STREAM)


def child_seed(seed: int, index: int) -> int:
    """Seed in 0 .. 2^64 - 1 of child `index` of a request with n > 1; child 0 has the request's own.

    Source of the finaliser: splitmix64 (Steele, Lea, Flood, OOPSLA'14).
    """
    if index == 0:
        return seed & MASK64
    z = (seed + index * SEED_STEP) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)
