"""The keyed random numbers of `framework.rng` inside a kernel: the same integers, and Gumbel noise in float32.

`bits` and `gumbel_noise` are called by the kernels of the draw; `framework.rng` is their reference. There is no log1p
that runs on a device and in the interpreter alike, so a short series stands where log(1 - u) would lose digits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fmix32(h):
    """murmur3's 32-bit finaliser of uint32."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def absorb(h, word):
    return fmix32(h ^ word) + 0x9E3779B9


@triton.jit
def key_word(start, seed, position, last):
    """One of the two uint32 words of `rng.row_key`; last = stream * 2 + level."""
    h = absorb(start, (seed & 0xFFFFFFFF).to(tl.uint32))
    h = absorb(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = absorb(h, (position & 0xFFFFFFFF).to(tl.uint32))
    return absorb(h, last.to(tl.uint32))


@triton.jit
def bits(seed, position, last, ids):
    """32 random bits for each of ids (int32, any shape) under the row's key. seed, position: int64 scalars."""
    first = key_word(tl.full((), 0x243F6A88, tl.uint32), seed, position, last)
    second = key_word(tl.full((), 0x85A308D3, tl.uint32), seed, position, last)
    return fmix32(fmix32((ids.to(tl.uint32) * 0x9E3779B1) ^ first) ^ second)


@triton.jit
def gumbel_noise(random):
    """Standard Gumbel noise, float32, of 32 random bits: -log(-log1p(-u)), u = (bits + 0.5) / 2^32.

    Within 2e-6 of the reference in float64. Below 1/32 six terms of -log1p(-u) leave less than 2^-32 of it out; above,
    1 - u is made of the complement of the bits, which has all its digits where u is near 1.
    """
    u = (random.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((random ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * (0.2 + u * (1.0 / 6))))))
    return -tl.log(tl.where(u < 0.03125, series, -tl.log(rest)))
